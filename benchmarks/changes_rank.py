"""What one rank of `changes` does."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

import commfuse_fx as cf
from benchmarks.netns import Layout, set_rate
from benchmarks.workloads import LEARNING_RATE, WORKLOADS

BLOCK = 20
"""Steps that are timed together."""

SOON = 100
"""Steps after a change, after which a step is timed."""

PHASE = 300
"""Steps between two changes."""


@dataclass(frozen=True)
class ChangesTask:
    """What to do. network, out and progress: as in `step_task.Task`."""

    workload: str
    scenario: str
    timeout: float
    network: int
    out: str
    progress: str


def run(task: ChangesTask) -> None:
    """Run the scenario. Rank 0 writes lines of text as JSON. The environment is that of torchrun."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    cf.init(backend="gloo", timeout=task.timeout)
    lines = SCENARIOS[task.scenario](_Loop(task))
    if rank == 0:
        Path(task.out).write_text(json.dumps(lines))
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


class _Loop:
    """A training loop with a step that plans itself."""

    def __init__(self, task: ChangesTask) -> None:
        self.task = task
        self.rank = dist.get_rank()
        self.messages: list[str] = []
        log = logging.getLogger("commfuse_fx.plan")
        log.setLevel(logging.INFO)
        log.addHandler(_Keep(self.messages))
        self.workload = WORKLOADS[task.workload]
        self.begin()

    def begin(self) -> None:
        """A fresh run."""
        torch.manual_seed(0)
        model = self.workload.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.step = cf.compile(model, loss_fn=self.workload.loss_fn, optimizer=optimizer, schedule="auto")
        self.args, self.kwargs = self.workload.batch(self.rank)

    def train(self, steps: int) -> float:
        """Seconds per step."""
        began = perf_counter()
        for number in range(steps):
            self.step(*self.args, **self.kwargs)
            if number % 10 == 0:
                self._note_progress()
        return (perf_counter() - began) / max(steps, 1)

    def settle(self) -> int:
        """Train until a plan stays. Returns the number of steps."""
        steps = 0
        while not self.is_settled:
            self.train(1)
            steps += 1
        return steps

    @property
    def is_settled(self) -> bool:
        replan = self.step.session.replan
        return replan is None or replan.is_settled

    def plan(self) -> str:
        """The plan that runs, which has to be the same on all ranks."""
        replan = self.step.session.replan
        mine = "default" if replan is None else replan.chosen_name
        everybody: list[str] = ["", ""]
        dist.all_gather_object(everybody, mine)
        if len(set(everybody)) > 1:
            raise RuntimeError(f"ranks run other plans: {everybody}")
        return mine

    def set_rate(self, rate: float | None) -> None:
        """All ranks together."""
        self.step.synchronize()
        dist.barrier()
        if self.rank == 0:
            set_rate(Layout(self.task.network, dist.get_world_size()), rate)
        dist.barrier()

    @contextmanager
    def neighbour(self) -> Iterator[None]:
        """Something else computes on the core of the last rank."""
        dist.barrier()
        busy = None
        if self.rank == dist.get_world_size() - 1:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on this rank's core
        try:
            yield
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()

    def _note_progress(self) -> None:
        if self.rank == 0:
            with Path(self.task.progress).open("a") as file:
                file.write(".")


class _Keep(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def _rates(loop: _Loop) -> list[str]:
    loop.set_rate(4.0)
    began = perf_counter()
    steps = loop.settle()
    lines = [f"4 Gbit/s: plan {loop.plan()!r} after {steps} steps, {perf_counter() - began:.0f} s"]
    loop.train(SOON)
    changed = {}
    for rate in (1.0, 4.0):
        loop.set_rate(rate)
        during = loop.train(SOON)
        changed[rate] = during, loop.train(BLOCK), loop.plan(), loop.is_settled
        loop.train(PHASE - SOON - BLOCK)
        loop.settle()
    lines += [f"log: {each.splitlines()[0]}" for each in loop.messages if each.startswith(("measuring", "plan "))]
    for rate, (during, after, plan, settled) in changed.items():
        loop.set_rate(rate)
        loop.begin()
        loop.settle()
        fresh = loop.train(BLOCK)
        fresh = min(fresh, loop.train(BLOCK))
        lines.append(
            f"to {rate:g} Gbit/s: {during * 1e3:.1f} ms in the first {SOON} steps, then {after * 1e3:.1f} ms with plan "
            f"{plan!r}{'' if settled else ' (still trying)'}; a fresh run {fresh * 1e3:.1f} ms with plan "
            f"{loop.plan()!r}: {after / fresh:.3f}"
        )
    return lines


def _neighbour(loop: _Loop) -> list[str]:
    loop.set_rate(2.0)
    loop.settle()
    before = loop.plan()
    quiet = loop.train(PHASE // 2)
    with loop.neighbour():
        noisy = loop.train(PHASE // 2)
        during = loop.plan()
    loop.train(PHASE // 2 - BLOCK)
    loop.settle()
    after = loop.train(BLOCK)
    lines = [f"log: {each.splitlines()[0]}" for each in loop.messages if not each.startswith("plans by")]
    return [
        *lines,
        f"before {quiet * 1e3:.1f} ms with plan {before!r}, beside a neighbour {noisy * 1e3:.1f} ms, at its end plan "
        f"{during!r}, afterwards {after * 1e3:.1f} ms with plan {loop.plan()!r}",
    ]


def _slow(loop: _Loop) -> list[str]:
    loop.set_rate(2.0)
    with loop.neighbour():
        steps = loop.settle()
        seconds = loop.train(BLOCK)
    named = [each for each in loop.messages if "computes" in each]
    return [*named, f"plan {loop.plan()!r} on all ranks after {steps} steps, {seconds * 1e3:.1f} ms"]


SCENARIOS: dict[str, Callable[[_Loop], list[str]]] = {"rates": _rates, "neighbour": _neighbour, "slow": _slow}
