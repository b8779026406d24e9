"""What searching strategies takes: a GPT-2 with parallel_mode="auto", by layers, meshes and under a memory limit, and
the first search of Llama shapes on two axes. One process, no devices."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from typing import Any
from unittest import mock

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.plain_models import GPT2, Llama
from commfuse_fx.sharding.search import axis_search, searched

WIDTH, HEADS, WORDS, LENGTH = 768, 12, 50304, 1024
CLUSTER = "h100-node"
LLAMAS = {"8B": (4096, 32, 8, 14336, 128256), "70B": (8192, 64, 8, 28672, 128256)}
"""Width, heads, groups of heads, inner width and words."""

PARTS = {"build": "LayoutProblem", "solve": "cheapest_choice", "fit": "within_budget"}
"""The parts of a search, and who does them."""


class Clock:
    """Notes what calls take, in seconds."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = self.call(*args, **options)
        self.seconds.append(time.perf_counter() - start)
        return found


def model_of(layers: int) -> GPT2:
    """A GPT-2 without memory."""
    with torch.device("meta"):
        model = GPT2(layers, WIDTH, HEADS, WORDS, LENGTH)
    model.head.weight = model.tokens.weight
    return model


def searched_step(model: torch.nn.Module, **options: Any) -> cf.Step:
    """A step whose strategies are searched."""
    return cf.compile(model, optimizer=torch.optim.AdamW(model.parameters()), parallel_mode="auto", **options)


def measure(layers: int, devices: int, mesh: tuple[int, ...] | None, limit: float | None = None) -> dict[str, Any]:
    """One row. mesh: None: the search chooses it. limit: of memory, in GiB."""
    model = model_of(layers)
    schedule = {} if limit is None else {"schedule": cf.ScheduleConfig(memory_limit=int(limit * 2**30))}
    step = searched_step(model, mesh=mesh, device_num=devices, cluster=CLUSTER, **schedule)
    ids = torch.zeros(8, LENGTH, dtype=torch.long)
    call = step.planner.take_apart((), {"ids": ids, "labels": ids})
    clocks = {part: Clock(getattr(axis_search, name)) for part, name in PARTS.items()}
    gc.collect()  # what the row before has left
    start = time.perf_counter()
    with mock.patch.multiple(axis_search, **{PARTS[part]: clock for part, clock in clocks.items()}):
        compiled = step.planner.read(call)
    total = time.perf_counter() - start
    return {
        "layers": layers,
        "devices": devices,
        "mesh": "free" if mesh is None else "x".join(map(str, mesh)),
        "limit_gib": limit,
        "first_build_seconds": clocks["build"].seconds[0],
        "first_solve_seconds": clocks["solve"].seconds[0],
        "searches": len(clocks["build"].seconds),
        "search_seconds": sum(sum(clock.seconds) for clock in clocks.values()),
        "planning_seconds": total - compiled.capture_seconds,
        "capture_seconds": compiled.capture_seconds,
    }


class SearchBegins(Exception):
    """In place of a search: what it is given."""


def first_search(name: str, layers: int, mesh: tuple[int, int]) -> dict[str, Any]:
    """The first search of a Llama: with each rank one row of 4096 tokens, on nodes of 8 H100."""
    with torch.device("meta"):
        model = Llama(layers, *LLAMAS[name], length=4096)
    devices = mesh[0] * mesh[1]
    step = searched_step(model, mesh=mesh, device_num=devices, cluster=f"h100-ib-{devices // 8}")

    def begin(program: Any, axes: Any, costs: Any, *_: Any) -> None:
        raise SearchBegins(program.copy(), axes, costs)

    ids = torch.zeros(1, 4096, dtype=torch.long)
    try:
        with mock.patch.object(searched, "searched", begin):
            step.lower(ids=ids, labels=ids)
    except SearchBegins as given:
        program, axes, costs = given.args
    gc.collect()
    start = time.process_time()
    problem = axis_search.AxisSearch(program, costs).problem(axes)
    built = time.process_time()
    found = axis_search.cheapest_choice(problem.graph, problem.parts)
    return {
        "model": name,
        "layers": layers,
        "mesh": "x".join(map(str, mesh)),
        "first_build_seconds": built - start,
        "first_solve_seconds": time.process_time() - built,
        "gap": found.gap,
        "peak_gib": getrusage(RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks search", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 32])
    parser.add_argument("--limit", type=float, default=9.0, help="GiB, for the row with a memory limit")
    parser.add_argument("--llama", action="store_true", help="Llama shapes as well")
    options = parser.parse_args(arguments)
    measure(1, 8, None)  # imports and caches of torch
    rows = [measure(layers, 8, (8,)) for layers in options.layers]
    first = options.layers[0]
    rows += [measure(first, 8, None), measure(first, 8, (2, 4)), measure(first, 8, (8,), options.limit)]
    head = (
        "layers",
        "mesh",
        "limit GiB",
        "build s",
        "solve s",
        "searches",
        "all of them s",
        "after capture s",
        "capture s",
    )
    print("{:>6} {:>5} {:>9} {:>8} {:>8} {:>9} {:>14} {:>16} {:>10}".format(*head))
    for row in rows:
        print(
            f"{row['layers']:6} {row['mesh']:>5} {row['limit_gib'] or '':>9} {row['first_build_seconds']:8.2f} "
            f"{row['first_solve_seconds']:8.2f} {row['searches']:9} {row['search_seconds']:14.2f} "
            f"{row['planning_seconds']:16.2f} {row['capture_seconds']:10.1f}"
        )
    shapes = (("8B", 32, (8, 8)), ("70B", 80, (8, 8)), ("70B", 80, (64, 8))) if options.llama else ()
    llamas = [first_search(*shape) for shape in shapes]
    for row in llamas:
        print(
            f"Llama-{row['model']}, {row['layers']} layers, {row['mesh']}: build {row['first_build_seconds']:.2f} s, "
            f"solve {row['first_solve_seconds']:.2f} s, proven gap {row['gap']:.2%}, peak {row['peak_gib']:.2f} GiB"
        )
    print(f"written to {save('search', [*rows, *llamas])}")
