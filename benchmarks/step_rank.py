"""What one rank of `step_time` does: build every variant, run them in turns at every rate, write down what it took."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from benchmarks.chart import blocked_and_sent, spans_of_events
from benchmarks.modes import MODES, Gauge, median_profile
from benchmarks.netns import Layout, set_rate, tool_path
from benchmarks.peers import PEERS
from benchmarks.step_task import Measured, Result, Task, label
from benchmarks.workloads import LEARNING_RATE, WORKLOADS, Workload
from commfuse_fx.cost.model import OVERHEAD

Rate = float | None


@dataclass(frozen=True)
class Variant:
    """`step()` trains one step. `finish()` waits for what steps left in flight."""

    step: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None
    compiled: cf.CompiledStep | None = None


def run(task: Task) -> None:
    """Measure, and write a `Result` as JSON to `task.out`. The environment is that of torchrun."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {_core(rank)})
    torch.set_num_threads(1)
    cf.init(backend="gloo", timeout=task.timeout)
    result = _Rank(task, rank).result()
    Path(task.out).write_text(result.to_json())
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


class _Rank:
    def __init__(self, task: Task, rank: int) -> None:
        self.task = task
        self.rank = rank
        self.layout = None if task.network is None else Layout(task.network, dist.get_world_size())
        self.workload = WORKLOADS[task.workload]
        self.calibrated: dict[Rate, cf.StepProfile] = {}
        self.profiles: list[tuple[Rate, cf.StepProfile]] = []
        self.variants: dict[Rate, dict[str, Variant]] = {rate: {} for rate in task.rates}
        self.measured = {rate: Measured() for rate in task.rates}
        self.skipped: dict[str, str] = {}

    @cached_property
    def gauge(self) -> Gauge:
        return Gauge(self.workload, self.rank)

    def result(self) -> Result:
        # Without a mode no step of this project's runs: it would change how the process keeps memory, for all variants.
        if any(name in MODES for name in self.task.variants):
            for rate in self.task.rates:
                self._set_rate(rate)
                self.calibrated[rate] = self.gauge.calibrated()
                self._note_progress()
        self._build_all()
        self._warm_up()
        names = list(dict.fromkeys(name for variants in self.variants.values() for name in variants))
        for number in range(self.task.rounds):
            # There and back again: what is slow at the begin of a round is not always the same. All rates of a variant
            # in a row: its limit is its own step without a rate, and the machine's speed changes within seconds.
            onward = -1 if number % 2 else 1
            for name in names[::onward]:
                for rate in self.task.rates[::onward]:
                    self._measure(rate, name)
                if name in MODES:
                    self._profile()
        for rate in self.calibrated:
            self._predict(rate)
        if self.task.timeline:
            for rate in self.task.rates:
                self._set_rate(rate)
                self._record_timelines(rate)
        return Result({label(rate): each for rate, each in self.measured.items()}, self.skipped)

    def _set_rate(self, rate: Rate) -> None:
        """All ranks together."""
        dist.barrier()
        if self.rank == 0 and self.layout is not None:
            set_rate(self.layout, rate)
        dist.barrier()

    def _build_all(self) -> None:
        """The variants that run, each with a model of its own; the others go into `skipped`."""
        torch.manual_seed(0)
        model = self.workload.model()
        for name in self.task.variants:
            by_rate = name in MODES and MODES[name].by_rate
            for rates in [(rate,) for rate in self.task.rates] if by_rate else [self.task.rates]:
                if by_rate:
                    self._set_rate(rates[0])
                variant = self._built(name, copy.deepcopy(model), rates[0])
                if variant is None:
                    break
                for rate in rates:
                    self.variants[rate][name] = variant

    def _built(self, name: str, model: nn.Module, rate: Rate) -> Variant | None:
        reason, start, variant = "", perf_counter(), None
        try:
            variant = _build(name, self.workload, model, self.calibrated.get(rate))
            variant.step()
            if name in MODES and MODES[name].tries_plans:
                self.measured[rate].settled[name] = self._settle(variant)
            variant.finish()
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
        print(f"{name}: {reason or 'ready'} after {perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        self._note_progress()
        if not any(reasons):
            return variant
        self.skipped[name] = next(reason for reason in reasons if reason)
        for built in self.variants.values():
            built.pop(name, None)
        return None

    def _settle(self, variant: Variant) -> str:
        """Train until the plan stays. Returns what came of it."""
        assert variant.compiled is not None
        replan, start, steps = variant.compiled.session.replan, perf_counter(), 0
        while replan is not None and not replan.is_settled:
            variant.step()
            steps += 1
            if steps % 20 == 0:
                self._note_progress()
        args, kwargs = self.workload.batch(self.rank)
        notes = [
            each for each in variant.compiled.lower(*args, **kwargs).explain().notes if each.topic == "plans tried"
        ]
        text = ", ".join(f"{each.subject} {each.reason}" for each in notes)
        return f"settled after {steps} steps and {perf_counter() - start:.1f} s: {text}"

    def _warm_up(self) -> None:
        """Lazily made state, buckets rebuilt after a first step, a slow start of TCP."""
        warm: list[Variant] = []
        for rate, variants in self.variants.items():
            self._set_rate(rate)
            for variant in variants.values():
                if variant not in warm:
                    variant.step()
                    variant.step()
                    variant.finish()
                    warm.append(variant)
            self._note_progress()

    def _measure(self, rate: Rate, name: str) -> None:
        """A block of consecutive steps at this rate; all ranks begin it together."""
        variant, measured = self.variants[rate][name], self.measured[rate]
        self._set_rate(rate)
        before = self._sent_bytes()
        measured.seconds.setdefault(name, []).append(self._block(variant))
        if before is not None:
            sent = (self._sent_bytes() or 0) - before
            measured.wire_bytes.setdefault(name, []).append(sent / (self.task.block + 1))
        self._note_progress()

    def _block(self, variant: Variant) -> float:
        """Seconds per step.

        What counts is the time from one step's return to the next one's, in the middle of a loop: a step goes ahead
        of the timed ones, whose rest, if it leaves one on the wire, is theirs; the rest of the last one is the next
        one's. Where blocks are synchronized, nothing is on the wire when they begin and when they end.
        """
        variant.step()
        if self.task.synchronized:
            variant.finish()
        start = perf_counter()
        for _ in range(self.task.block):
            variant.step()
        if self.task.synchronized:
            variant.finish()
        seconds = perf_counter() - start
        variant.finish()
        # The last bytes of a rank that is done may still be in its queue until the others are done too.
        dist.barrier()
        return seconds / self.task.block

    def _profile(self) -> None:
        """The step's compute, once more: what is predicted is then of the same moments as what is measured. All rates
        take turns."""
        rate = self.task.rates[len(self.profiles) % len(self.task.rates)]
        self._set_rate(rate)
        self.profiles.append((rate, self.gauge.again(self.calibrated[rate].cluster)))
        self._note_progress()

    def _profile_at(self, rate: Rate) -> cf.StepProfile:
        """What the nodes take at all rates, since nothing is on the wire while they are measured; and at this one the
        network and what a step takes besides."""
        first = self.calibrated[rate]
        besides = [profile.node_seconds[OVERHEAD] for at, profile in self.profiles if at == rate]
        seconds = median_profile([profile for _, profile in self.profiles] or [first]).node_seconds
        overhead = median(besides) if besides else first.node_seconds[OVERHEAD]
        return replace(first, node_seconds={**seconds, OVERHEAD: overhead})

    def _predict(self, rate: Rate) -> None:
        """What the simulator says of every mode and its plan, with the step's compute as it was measured in between."""
        profile = self._profile_at(rate)
        for name, variant in self.variants[rate].items():
            if variant.compiled is not None and MODES[name].is_priced:
                args, kwargs = MODES[name].batch(self.workload, self.rank, dist.get_world_size())
                lowered = variant.compiled.lower(*args, **kwargs)
                explanation = lowered.explain(profile)
                self.measured[rate].predicted[name] = explanation.simulation.step_seconds
                if self.task.timeline:
                    self.measured[rate].simulated[name] = spans_of_events(explanation.simulation.events)
                collectives = explanation.collectives
                self.measured[rate].plans[name] = {
                    "collectives": len(collectives),
                    "next_step": sum(1 for each in collectives if each.next_step),
                    "messages": sum(each.pieces for each in collectives),
                }
        self._note_progress()

    def _record_timelines(self, rate: Rate) -> None:
        """One measured step of every mode, as spans in seconds from the step's begin."""
        for name, variant in self.variants[rate].items():
            if variant.compiled is None:
                continue
            dist.barrier()
            with variant.compiled.record_communication() as timeline:
                # One step before, recorded as well: what it leaves in flight is part of the picture.
                variant.step()
                begin = perf_counter()
                variant.step()
                end = perf_counter()
                self.measured[rate].timelines[name] = blocked_and_sent(timeline.steps[-1], begin, end)
                variant.finish()
            self._note_progress()

    def _sent_bytes(self) -> int | None:
        """What this rank has sent since it got its rate, as the rate limiter counts it: every packet's headers.

        Without a limiter the interface's own counter, which counts one header per large send of up to 64 KiB.
        """
        if self.layout is None:
            return None
        interface = self.layout.interface(self.rank)
        shown = subprocess.run(
            [tool_path("tc"), "-s", "-j", "qdisc", "show", "dev", interface], capture_output=True, text=True, check=True
        )
        for qdisc in json.loads(shown.stdout):
            if qdisc["kind"] == "tbf":
                return int(qdisc["bytes"])
        return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())

    def _note_progress(self) -> None:
        if self.rank == 0:
            with Path(self.task.progress).open("a") as file:
                file.write(".")


def _build(name: str, workload: Workload, model: nn.Module, cluster: cf.StepProfile | None) -> Variant:
    if name in PEERS or cluster is None:
        return Variant(PEERS[name](workload, model))
    mode = MODES[name]
    options: Mapping[str, Any] = mode.options(cluster)
    if mode.marks is not None:
        cf.shard(model, mode.marks(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer, **options)
    args, kwargs = mode.batch(workload, dist.get_rank(), dist.get_world_size())
    return Variant(lambda: step(*args, **kwargs), step.synchronize, step)


def _core(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
