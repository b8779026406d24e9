"""One process: a step with backend="inductor" against eager PyTorch, the same step op by op, and torch.compile.

Steps are interleaved, all with AdamW(fused=True). The caches of compiled code are empty at the first step. With
--first-step only that is timed, in processes of their own: one that finds no code on disk, and one that does.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache
from torch.utils._pytree import tree_map_only

from benchmarks.first_step import SIZED, VARIANTS, table
from benchmarks.measure import interleave, ratios, save
from benchmarks.workloads import WORKLOADS, Workload, classes


class Activations(nn.Module):
    """Pointwise ops alone, where rounding in between costs most."""

    def __init__(self, width: int = 4096, layers: int = 8) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.sigmoid(torch.tanh(x * scale))
        return x


MODELS = {
    **{name: SIZED[name](layers) for name, layers in (("gpt2", 6), ("bert", 6), ("llama", 6), ("mlp", 8))},
    "convnet": WORKLOADS["convnet"],
    "activations": Workload("activations", Activations, classes(256, 4096)),
}


def in_bfloat16(workload: Workload) -> Workload:
    """The same workload with parameters and inputs in bfloat16."""

    def batch(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map_only(torch.Tensor, _halved, workload.batch(rank))

    return replace(workload, model=lambda: workload.model().bfloat16(), batch=batch)


def _halved(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def measure(workload: Workload, variants: Sequence[str], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = workload.model()
    steps: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name in variants:
        twin = copy.deepcopy(model)
        with tempfile.TemporaryDirectory() as folder, fresh_inductor_cache(dir=folder):
            start = time.perf_counter()
            steps[name] = VARIANTS[name](workload, twin)
            steps[name]()
            first[name] = time.perf_counter() - start
    times = interleave(steps, rounds)
    return {
        "ms": {name: statistics.median(times[name]) * 1e3 for name in variants},
        "first step s": first,
        "ratio": {name: ratios(times, name, variants[0]) for name in variants},
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks inductor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--workloads", nargs="+", default=list(MODELS)[:-1], choices=list(MODELS))
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["torch.compile", "eager", "op by op", "inductor"],
        choices=list(VARIANTS),
        help="the first is what others are compared with; "
        '"layers" is inductor with inductor_regions="layers", "rounded" rounds all results of half precision',
    )
    parser.add_argument("--bfloat16", action="store_true", help="parameters and inputs in bfloat16")
    parser.add_argument(
        "--first-step", action="store_true", help="time only the first step, with and without code on disk"
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[6], help="with --first-step: numbers of equal layers")
    options = parser.parse_args(arguments)
    if options.first_step:
        names = [name for name in options.workloads if name in SIZED]
        print(f"written to {save('inductor_first_step', table(names, options.layers, options.variants))}")
        return
    results: dict[str, Any] = {}
    base, *others = options.variants
    print(f"{'workload':12} {'variant':14} {'first s':>8} {'ms':>8} {'/ ' + base:>16} {'(quartiles)':>15}")
    for name in options.workloads:
        workload = in_bfloat16(MODELS[name]) if options.bfloat16 else MODELS[name]
        results[name] = measure(workload, options.variants, options.rounds)
        for variant, (low, middle, high) in results[name]["ratio"].items():
            first, ms = results[name]["first step s"][variant], results[name]["ms"][variant]
            shown = f"({low:.3f}-{high:.3f})"
            print(f"{name:12} {variant:14} {first:8.1f} {ms:8.1f} {middle:16.3f} {shown:>15}", flush=True)
    for variant in others:
        found = [result["ratio"][variant][1] for result in results.values()]
        print(f"geometric mean of {variant} / {base}: {math.exp(statistics.mean(map(math.log, found))):.3f}")
    print(f"written to {save('inductor', results)}")
