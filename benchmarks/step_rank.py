"""What one rank of `step_time` does: build every variant, run them in turns, write down seconds and bytes."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from benchmarks.chart import Span, blocked_and_sent, spans_of_events
from benchmarks.modes import MODES, prepare, simulate
from benchmarks.netns import tool_path
from benchmarks.peers import PEERS
from benchmarks.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Task:
    """One workload at one rate (Gbit/s, None for no limit), as one rank's process gets it.

    interface: whose sent bytes count; None where they mean nothing. out: file for the result. progress: file that
    rank 0 makes longer whenever something is done.
    """

    workload: str
    rate: float | None
    variants: tuple[str, ...]
    rounds: int
    block: int
    timeout: float
    timeline: bool
    interface: str | None
    out: str
    progress: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        values = json.loads(text)
        return cls(**{**values, "variants": tuple(values["variants"])})


@dataclass(frozen=True)
class Variant:
    """`step()` trains one step. `finish()` waits for what steps left in flight."""

    step: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None
    compiled: cf.CompiledStep | None = None


@dataclass
class Result:
    """Of one rank; per block: `seconds` and sent `wire_bytes` per step. `skipped`: variant -> why.

    `predicted`: simulated seconds per step.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wire_bytes: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    timelines: dict[str, list[Span]] = field(default_factory=dict)
    simulated: dict[str, list[Span]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Result:
        return cls(**json.loads(text))


def run(task: Task) -> None:
    """Measure, and write a `Result` as JSON to `task.out`. The environment is that of torchrun."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {_core(rank)})
    torch.set_num_threads(1)
    cf.init(backend="gloo", timeout=task.timeout)
    workload = WORKLOADS[task.workload]
    result = Result()
    cluster = prepare(rank, workload, task.rate)
    variants = _build_all(task, workload, cluster, result)
    # The first block warms up: lazily made state, buckets rebuilt after a first step, a slow start of TCP.
    measure(variants, 1, task, Result())
    measure(variants, task.rounds, task, result)
    predict(variants, task, cluster, result)
    if task.timeline:
        record_timelines(variants, task, cluster, result)
    Path(task.out).write_text(json.dumps(asdict(result)))
    dist.barrier()
    variants.clear()
    gc.collect()
    dist.destroy_process_group()


def measure(variants: Mapping[str, Variant], rounds: int, task: Task, result: Result) -> None:
    """Blocks of consecutive steps; the variants take turns, and all ranks begin a turn together.

    What counts is the time from one step's return to the next one's, in the middle of a loop: a step goes ahead of
    the timed ones, whose rest, if it leaves one on the wire, is theirs; the rest of the last one is the next one's.
    """
    for _ in range(rounds):
        for name, variant in variants.items():
            dist.barrier()
            before = sent_bytes(task.interface)
            variant.step()
            start = perf_counter()
            for _ in range(task.block):
                variant.step()
            seconds = perf_counter() - start
            variant.finish()
            # The last bytes of a rank that is done may still be in its queue until the others are done too.
            dist.barrier()
            result.seconds.setdefault(name, []).append(seconds / task.block)
            if before is not None:
                sent = (sent_bytes(task.interface) or 0) - before
                result.wire_bytes.setdefault(name, []).append(sent / (task.block + 1))
            _note_progress(task)


def predict(variants: Mapping[str, Variant], task: Task, cluster: Any, result: Result) -> None:
    """What the simulator says of every mode of this project, with the figures that were measured before."""
    args, kwargs = WORKLOADS[task.workload].batch(dist.get_rank())
    for name, variant in variants.items():
        if variant.compiled is not None and cluster is not None:
            result.predicted[name] = variant.compiled.lower(*args, **kwargs).simulate(cluster).step_seconds


def record_timelines(variants: Mapping[str, Variant], task: Task, cluster: Any, result: Result) -> None:
    """One step of every mode of this project, measured and simulated, as spans in seconds from the step's begin."""
    args, kwargs = WORKLOADS[task.workload].batch(dist.get_rank())
    for name, variant in variants.items():
        if variant.compiled is None:
            continue
        dist.barrier()
        with variant.compiled.record_communication() as timeline:
            # One step before, recorded as well: what it leaves in flight is part of the picture.
            variant.step()
            begin = perf_counter()
            variant.step()
            end = perf_counter()
            result.timelines[name] = blocked_and_sent(timeline.steps[-1], begin, end)
            variant.finish()
        try:
            result.simulated[name] = spans_of_events(simulate(variant.compiled, args, kwargs, cluster))
        except cf.CommFuseError as error:
            result.skipped[f"{name}: simulation"] = f"{type(error).__name__}: {_first_line(error)}"
        _note_progress(task)


def sent_bytes(interface: str | None) -> int | None:
    """What the interface has sent since it got its rate, as the rate limiter counts it: every packet's headers.

    Without a limiter the interface's own counter, which counts one header per large send of up to 64 KiB.
    """
    if interface is None:
        return None
    shown = subprocess.run(
        [tool_path("tc"), "-s", "-j", "qdisc", "show", "dev", interface], capture_output=True, text=True, check=True
    )
    for qdisc in json.loads(shown.stdout):
        if qdisc["kind"] == "tbf":
            return int(qdisc["bytes"])
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _build_all(task: Task, workload: Workload, cluster: Any, result: Result) -> dict[str, Variant]:
    """The variants that run, each with a model of its own; the others go into `result.skipped`."""
    torch.manual_seed(0)
    model = workload.model()
    variants: dict[str, Variant] = {}
    for name in task.variants:
        reason, start = "", perf_counter()
        try:
            variant = _build(name, workload, copy.deepcopy(model), cluster)
            variant.step()
            variant.finish()
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
        print(f"{name}: {reason or 'ready'} after {perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            result.skipped[name] = next(reason for reason in reasons if reason)
        else:
            variants[name] = variant
        _note_progress(task)
    return variants


def _build(name: str, workload: Workload, model: nn.Module, cluster: Any) -> Variant:
    if name in PEERS:
        return Variant(PEERS[name](workload, model))
    step = cf.compile(
        model, loss_fn=workload.loss_fn, optimizer=torch.optim.AdamW(model.parameters()), **MODES[name](cluster)
    )
    args, kwargs = workload.batch(dist.get_rank())
    return Variant(lambda: step(*args, **kwargs), step.synchronize, step)


def _note_progress(task: Task) -> None:
    if dist.get_rank() == 0:
        with Path(task.progress).open("a") as file:
            file.write(".")


def _core(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
