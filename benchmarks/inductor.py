"""One process: a step with backend="inductor" against eager PyTorch, the same step op by op, and torch.compile.

Steps are interleaved, all with AdamW(fused=True). The caches of compiled code are empty at the first step.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.utils import fresh_inductor_cache

import commfuse_fx as cf
from benchmarks.measure import interleave, ratios, save
from benchmarks.single_process import eager_step as trained
from benchmarks.workloads import LEARNING_RATE, MLP, WORKLOADS, Workload, bert, classes, gpt2, llama, tokens

MODELS = {
    "gpt2": Workload("gpt2", lambda: gpt2(6, 384), tokens(8, 128), None),
    "bert": Workload("bert", lambda: bert(6, 256), WORKLOADS["bert"].batch, None),
    "llama": Workload("llama", lambda: llama(6, 256), tokens(8, 128), None),
    "mlp": Workload("mlp", lambda: MLP(512, 8), classes(256, 512)),
    "convnet": WORKLOADS["convnet"],
}


def eager_step(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    return trained(workload, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def compiled_by_torch(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    step: Any = torch.compile(model)
    return eager_step(workload, step)


def compiled_step(workload: Workload, model: torch.nn.Module, **options: Any) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    args, kwargs = workload.batch(0)
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer, **options)
    return lambda: step(*args, **kwargs)


VARIANTS: dict[str, Callable[[Workload, torch.nn.Module], Callable[[], Any]]] = {
    "eager": eager_step,
    "torch.compile": compiled_by_torch,
    "op by op": compiled_step,
    "inductor": lambda workload, model: compiled_step(workload, model, backend="inductor"),
}


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = workload.model()
    steps: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name, make in VARIANTS.items():
        twin = copy.deepcopy(model)
        with tempfile.TemporaryDirectory() as folder, fresh_inductor_cache(dir=folder):
            start = time.perf_counter()
            steps[name] = make(workload, twin)
            steps[name]()
            first[name] = time.perf_counter() - start
    times = interleave(steps, rounds)
    return {
        "ms": {name: statistics.median(times[name]) * 1e3 for name in VARIANTS},
        "first step s": first,
        "ratio to torch.compile": {name: ratios(times, name, "torch.compile") for name in VARIANTS},
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks inductor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--workloads", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    print(f"{'workload':12} {'variant':14} {'first s':>8} {'ms':>8} {'/ torch.compile':>16} {'(quartiles)':>15}")
    for name in options.workloads:
        results[name] = measure(MODELS[name], options.rounds)
        for variant, (low, middle, high) in results[name]["ratio to torch.compile"].items():
            first, ms = results[name]["first step s"][variant], results[name]["ms"][variant]
            shown = f"({low:.3f}-{high:.3f})"
            print(f"{name:12} {variant:14} {first:8.1f} {ms:8.1f} {middle:16.3f} {shown:>15}", flush=True)
    found = [result["ratio to torch.compile"]["inductor"][1] for result in results.values()]
    print(f"geometric mean of inductor / torch.compile: {math.exp(statistics.mean(map(math.log, found))):.3f}")
    print(f"written to {save('inductor', results)}")
