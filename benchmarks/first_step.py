"""Seconds that the first step of a model takes, in processes of their own: with no compiled code on disk, and with it.

Imports of Inductor are among them; those of torch and this package, and making the model, are not. CPU seconds are
those of the whole process with the compilers that it starts, and are steadier.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config

import commfuse_fx as cf
from benchmarks.single_process import eager_step
from benchmarks.workloads import LEARNING_RATE, MLP, WORKLOADS, Workload, bert, classes, gpt2, llama, tokens

SIZED: dict[str, Callable[[int], Workload]] = {
    "gpt2": lambda layers: Workload("gpt2", lambda: gpt2(layers, 384), tokens(8, 128), None),
    "bert": lambda layers: Workload("bert", lambda: bert(layers, 256), WORKLOADS["bert"].batch, None),
    "llama": lambda layers: Workload("llama", lambda: llama(layers, 256), tokens(8, 128), None),
    "mlp": lambda layers: Workload("mlp", lambda: MLP(512, layers), classes(256, 512)),
}
"""Workloads by their number of equal layers."""


def trained(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    return eager_step(workload, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def compiled_by_torch(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    step: Any = torch.compile(model)
    return trained(workload, step)


def compiled_step(workload: Workload, model: torch.nn.Module, **options: Any) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    args, kwargs = workload.batch(0)
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer, **options)
    return lambda: step(*args, **kwargs)


def rounded_step(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    """A step whose regions round every result of half precision, as if all of them decided something."""
    step = compiled_step(workload, model, backend="inductor")

    def run() -> Any:
        with config.patch(emulate_precision_casts=True):
            return step()

    return run


VARIANTS: dict[str, Callable[[Workload, torch.nn.Module], Callable[[], Any]]] = {
    "eager": trained,
    "torch.compile": compiled_by_torch,
    "op by op": compiled_step,
    "inductor": lambda workload, model: compiled_step(workload, model, backend="inductor"),
    "layers": lambda workload, model: compiled_step(workload, model, backend="inductor", inductor_regions="layers"),
    "rounded": rounded_step,
}


def table(names: Sequence[str], layers: Sequence[int], variants: Sequence[str]) -> dict[str, Any]:
    """Print and return a row for each workload, number of layers and variant."""
    results: dict[str, Any] = {}
    columns = "workload", "layers", "variant", "compiled", "first process s", "CPU s", "second s", "CPU s"
    print("{:12} {:>6} {:14} {:>8} {:>16} {:>8} {:>9} {:>8}".format(*columns))
    for name in names:
        for count in layers:
            for variant in variants:
                with tempfile.TemporaryDirectory() as folder:
                    first, second = (_in_a_process(name, count, variant, folder) for _ in range(2))
                results[f"{name} {count} {variant}"] = {"first": first, "second": second}
                seconds = f"{first['seconds']:16.1f} {first['cpu']:8.1f} {second['seconds']:9.1f} {second['cpu']:8.1f}"
                print(f"{name:12} {count:6} {variant:14} {first['compiled']:8} {seconds}", flush=True)
    return results


def _in_a_process(name: str, layers: int, variant: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.first_step", name, str(layers), variant]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    before = _cpu_seconds_of_children()
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "cpu": _cpu_seconds_of_children() - before}


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measure(name: str, layers: int, variant: str) -> dict[str, Any]:
    """seconds: of the first step. compiled: how many graphs went through Inductor, or were found on disk."""
    torch.manual_seed(0)
    workload = SIZED[name](layers)
    model = workload.model()
    start = time.perf_counter()
    VARIANTS[variant](workload, model)()
    seconds = time.perf_counter() - start
    from torch._dynamo.utils import counters

    found = counters["aot_autograd"]
    return {"seconds": seconds, "compiled": found["autograd_cache_miss"] + found["autograd_cache_hit"]}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
