"""Measure variants of one workload on a device: time in turns, peak memory, and first steps, also of a new process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.utils import fresh_inductor_cache

import commfuse_fx as cf
from benchmarks.gpu_workloads import GPUWorkload, Step, make_step
from benchmarks.measure import ratios

TIME, MEMORY, FIRST, AGAIN = "time", "peak memory", "first step", "first step of a second process"
WARM = 5
"""Steps before anything but the first one is measured; a graph is captured in one of them."""


@dataclass
class Measured:
    """What one variant takes: seconds of a step, block by block, of first steps here and in a second process, bytes.

    why: the reason for which it is missing. failed: whether that is another error than that of an option.
    """

    seconds: list[float] = field(default_factory=list)
    first: float | None = None
    again: float | None = None
    peak: int | None = None
    why: str | None = None
    failed: bool = False


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def warm_up(device: torch.device) -> None:
    """Start what torch.compile starts once in a process, so that no variant's first step contains it."""
    torch.compile(lambda x: x + 1)(torch.ones(2, device=device))


def first_step(variant: str, workload: GPUWorkload, device: torch.device) -> tuple[Step, float]:
    """A step that has run once, and the seconds that this took, with tracing and compiling."""
    step = make_step(variant, workload, device)
    return step, timed(step, device)


def measure(
    workload: GPUWorkload,
    variants: Sequence[str],
    device: torch.device,
    rounds: int,
    again: Mapping[str, list[str]],
    instead: Mapping[str, str],
) -> dict[str, Measured]:
    """Measure the variants in their order.

    A variant that raises the error of an option is missing; after another error the rest is measured all the same.

    instead: variants that are left out unless another one, which comes before them, is missing.
    again: for some of them the command that prints the first step's seconds last. Where there is one, each variant
        begins with empty caches of compiled code; else later ones find what earlier ones have compiled.
    """
    found: dict[str, Measured] = {}
    steps: dict[str, Step] = {}
    with ExitStack() as stack:
        if not again:
            stack.enter_context(_empty_cache())
        for variant in variants:
            if variant in instead and found[instead[variant]].why is None:
                continue
            with _empty_cache() if again else nullcontext():
                found[variant], step = _begun(variant, workload, device)
                if step is not None:
                    steps[variant] = step
                    if variant in again:
                        found[variant].again = _seconds_of(again[variant])
    for _ in range(rounds):
        for variant, step in steps.items():
            took = timed(lambda step=step: _block(step, workload.block), device)
            found[variant].seconds.append(took / workload.block)
    return found


@contextmanager
def _empty_cache() -> Iterator[None]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_inductor_cache(dir=folder):
        yield


def _block(step: Step, count: int) -> None:
    for _ in range(count):
        step()


def _begun(variant: str, workload: GPUWorkload, device: torch.device) -> tuple[Measured, Step | None]:
    gc.collect()
    before = _allocated(device), _held_for_graphs(device)
    try:
        step, first = first_step(variant, workload, device)
        _block(step, WARM)
        return Measured(first=first, peak=_peak(step, device, *before)), step
    except (cf.NotAvailableError, cf.ConfigValueError) as error:
        return Measured(why=str(error)), None
    except Exception as error:
        traceback.print_exc()
        return Measured(why=f"{type(error).__name__}: {error}", failed=True), None


def _peak(step: Step, device: torch.device, allocated: int, held: int) -> int | None:
    """Bytes at the peak of a step: what lives, and what graphs have reserved for their replays."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    timed(step, device)
    return torch.cuda.max_memory_allocated(device) - allocated + _held_for_graphs(device) - held


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _held_for_graphs(device: torch.device) -> int:
    """Bytes of the private pools of CUDA graphs in which nothing lives between replays."""
    if device.type != "cuda":
        return 0
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    private = [each for each in segments if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in private)


def _seconds_of(command: Sequence[str]) -> float | None:
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=dict(os.environ))
    if ended.returncode:
        print(ended.stderr[-2000:], file=sys.stderr)
        return None
    return float(ended.stdout.split()[-1])


def ratio(what: str, ours: Measured, against: Measured) -> float | None:
    """The ratio of two variants; None where one of them is missing. A second process is compared with a first one."""
    if ours.why is not None or against.why is not None:
        return None
    if what == TIME:
        return ratios({"ours": ours.seconds, "against": against.seconds}, "ours", "against")[1]
    pairs = {
        MEMORY: (ours.peak, against.peak),
        FIRST: (ours.first, against.first),
        AGAIN: (ours.again, against.first),
    }
    mine, other = pairs[what]
    return None if mine is None or other is None else mine / other
