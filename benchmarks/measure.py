"""Timing and memory helpers. Figures are medians; comparisons are ratios of interleaved runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.step_summary import pairwise

OUT = Path("out") / "benchmarks"

RETURNING = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "OMP_NUM_THREADS": "1",
}
"""Environment in which memory that is freed goes back to the system at once."""

MIB = 2**20


def interleave(steps: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Run the steps in turn, `rounds` times each after `warmup`; seconds per call."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            elapsed = time.perf_counter() - start
            if number >= warmup:
                times[name].append(elapsed)
    return times


def at_least(low: int) -> Callable[[str], int]:
    """The type of a command's option."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def ratios(times: Mapping[str, list[float]], numerator: str, denominator: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the pairwise ratios."""
    return pairwise(times[numerator], times[denominator])


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Highest resident memory since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def save(name: str, result: Any) -> Path:
    """Write the result as JSON under out/benchmarks."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
