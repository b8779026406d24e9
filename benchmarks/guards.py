"""What looking for changed attributes costs before every step of a model of many modules, in one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from benchmarks.measure import save

MODULES_PER_BLOCK = 4


def model(blocks: int, width: int) -> nn.Module:
    """Blocks of a linear layer, a norm, an activation and dropout, each module with attributes that a trace reads."""
    parts: list[nn.Module] = []
    for _ in range(blocks):
        parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.LeakyReLU(0.1), nn.Dropout(0.0)]
    return nn.Sequential(*parts)


def cpu_seconds(function: Callable[[], Any], count: int, rounds: int) -> float:
    """CPU time of this process for one call: the median of `rounds` rounds of `count` calls."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(count):
            function()
        taken.append((time.process_time() - start) / count)
    return median(taken)


def measure(modules: int, width: int, rows: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a step, of everything that finds its graph, and of the look at what its trace has read."""
    torch.manual_seed(0)
    net = model(modules // MODULES_PER_BLOCK, width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)
    step = cf.compile(net, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    for _ in range(2):
        step(x, y)
    planner = step.planner
    call = planner.take_apart((x, y), {})
    plan = planner.known_plan(call)
    assert plan is not None, "the step has run"
    return {
        "modules": len(list(net.modules())),
        "width": width,
        "rows": rows,
        "step_seconds": cpu_seconds(lambda: step(x, y), 5, rounds),
        "finding_seconds": cpu_seconds(lambda: planner.known_plan(call), 200, rounds),
        "guards_seconds": cpu_seconds(plan.guards.hold, 200, rounds),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks guards", description=__doc__)
    parser.add_argument("--modules", type=int, nargs="+", default=[100, 1_000])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    rows = [measure(modules, options.width, options.rows, options.rounds) for modules in options.modules]
    print(f"{'modules':>8} {'step ms':>9} {'finding us':>11} {'guards us':>10} {'guards / step':>14}")
    for row in rows:
        print(
            f"{row['modules']:8} {1e3 * row['step_seconds']:9.2f} {1e6 * row['finding_seconds']:11.1f} "
            f"{1e6 * row['guards_seconds']:10.1f} {row['guards_seconds'] / row['step_seconds']:14.2%}"
        )
    print(f"written to {save('guards', rows)}")
