"""One process, no communication: a compiled step against the eager step with the same optimizer defaults.

Time is the ratio of interleaved steps in one process. Memory is the peak above what the imports take,
each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import interleave, peak_bytes, ratios, reset_peak, resident_bytes, save
from benchmarks.workloads import WORKLOADS, Workload, eager_loss

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


def eager_step(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    args, kwargs = workload.batch(0)

    def step() -> None:
        optimizer.zero_grad()
        eager_loss(workload, model, args, kwargs).backward()
        optimizer.step()

    return step


def compiled_step(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    args, kwargs = workload.batch(0)
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer)
    return lambda: step(*args, **kwargs)


VARIANTS = {"eager": eager_step, "compiled": compiled_step}


def time_ratio(workload: Workload, optimizer: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = workload.model()
    steps: dict[str, Callable[[], Any]] = {}
    for name, make in VARIANTS.items():
        twin = copy.deepcopy(model)
        steps[name] = make(workload, twin, OPTIMIZERS[optimizer](twin.parameters()))
    times = interleave(steps, rounds)
    low, middle, high = ratios(times, "compiled", "eager")
    return {
        "eager_ms": statistics.median(times["eager"]) * 1e3,
        "compiled_ms": statistics.median(times["compiled"]) * 1e3,
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def peak_of(variant: str, workload: Workload, optimizer: str) -> int:
    """Peak bytes of a few steps above the memory of a process that has imported and compiled something small."""
    tiny = torch.nn.Linear(2, 1)
    cf.compile(tiny, loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW(tiny.parameters()))(
        torch.ones(1, 2), torch.ones(1, 1)
    )
    workload.batch(0)
    before = resident_bytes()
    torch.manual_seed(0)
    model = workload.model()
    step = VARIANTS[variant](workload, model, OPTIMIZERS[optimizer](model.parameters()))
    step()
    reset_peak()
    for _ in range(3):
        step()
    return peak_bytes() - before


def memory_ratio(workload: str, optimizer: str) -> dict[str, Any]:
    peaks: dict[str, float] = {}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "benchmarks", "single_process", "--peak-of", variant, workload, optimizer]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(3)]
        peaks[variant] = statistics.median(int(run.split()[-1]) for run in runs)
    return {
        "eager_peak_mib": peaks["eager"] / 2**20,
        "compiled_peak_mib": peaks["compiled"] / 2**20,
        "peak_ratio": peaks["compiled"] / peaks["eager"],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks single_process", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--workloads", nargs="+", default=["mlp", "gpt2", "lstm"], choices=sorted(WORKLOADS))
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "SGD"], choices=sorted(OPTIMIZERS))
    parser.add_argument("--peak-of", nargs=3, metavar=("VARIANT", "WORKLOAD", "OPTIMIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak_of:
        variant, workload, optimizer = options.peak_of
        print(peak_of(variant, WORKLOADS[workload], optimizer))
        return
    results: dict[str, Any] = {}
    columns = f"{'eager ms':>9} {'compiled':>9} {'ratio':>7} {'(quartiles)':>15} {'peak ratio':>11}"
    print(f"{'workload':12} {'optimizer':10} {columns}")
    for workload in options.workloads:
        for optimizer in options.optimizers:
            result = time_ratio(WORKLOADS[workload], optimizer, options.rounds)
            result.update(memory_ratio(workload, optimizer))
            results[f"{workload}.{optimizer}"] = result
            low, high = result["ratio_quartiles"]
            print(
                f"{workload:12} {optimizer:10} {result['eager_ms']:9.1f} {result['compiled_ms']:9.1f} "
                f"{result['ratio']:7.3f} {f'({low:.3f}-{high:.3f})':>15} {result['peak_ratio']:11.3f}"
            )
    print(f"written to {save('single_process', results)}")
