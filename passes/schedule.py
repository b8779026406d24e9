"""The cost-based schedule: of several arrangements of one graph the fastest, by simulation, that fits into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.rounds import play
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.meta import info, tensor_spec
from commfuse_fx.ir.order import reorder
from commfuse_fx.ir.program import Note, Program
from commfuse_fx.passes.across_steps import AcrossSteps
from commfuse_fx.passes.overlap import Overlap, start_late
from commfuse_fx.passes.reinplace import Reinplace
from commfuse_fx.passes.stream_buckets import StreamBuckets

log = logging.getLogger("commfuse_fx")

LEADS = (0.5, 0.25, 0.1, 0.05, 0.02, 0.0)
"""How far ahead of its wait a collective that allocates memory may start, in parts of the step's compute time; tried in
this order until the step fits into the memory."""

EQUAL = 1e-9
"""Relative difference below which two simulated times count as the same."""


@dataclass(frozen=True)
class Schedule:
    """`memory_limit`: bytes that the step may have allocated at most. `across_steps`: updates may run in the next step.

    Bitwise neutral: the same ops on the same values, in another order.
    Raises ConfigValueError when no arrangement fits into the memory.
    """

    costs: CostModel
    memory_limit: int | None = None
    across_steps: bool = False
    name: str = "schedule"
    requires: tuple[str, ...] = ("averaged", "split")
    ensures: tuple[str, ...] = ("scheduled",)

    def __call__(self, program: Program) -> bool:
        if self.memory_limit is not None:
            self._check_limit(program)
        if not any(True for _ in program.collectives()):
            return False
        candidates = list(self._candidates(program))
        best = self._best(candidates)
        modified = best.apply(program)
        self._report(program, candidates, best)
        return modified

    def _candidates(self, program: Program) -> Iterator[_Candidate]:
        """Every arrangement worth a look; what comes first wins where two are equally fast."""
        start = _Arrangement.of(program)
        for name, arrange in self._ways():
            start.restore(program)
            if arrange(program) or name == "unscheduled":
                yield self._judged(name, program)
        start.restore(program)

    def _ways(self) -> Iterator[tuple[str, Callable[[Program], bool]]]:
        def overlapped(program: Program) -> bool:
            Overlap()(program)
            return True

        def streamed(program: Program) -> bool:
            Overlap()(program)
            return StreamBuckets()(program)

        def across(program: Program) -> bool:
            Overlap()(program)
            return AcrossSteps(self.costs)(program)

        if self.across_steps:
            yield "across steps", across
        yield "overlap", overlapped
        yield "overlap, large buckets in pieces", streamed
        yield "unscheduled", lambda program: False

    def _judged(self, name: str, program: Program) -> _Candidate:
        """What this arrangement takes; where it does not fit, with as much memory given back as it takes to fit."""
        if self.memory_limit is None:
            return _Candidate(name, self._seconds(program), None, _Arrangement.of(program))
        start = _Arrangement.of(program)
        peak = 0
        for lead in (None, *LEADS):
            start.restore(program)
            if lead is not None and not start_late(program, self.costs, lead):
                continue
            # What the step allocates depends on which ops will overwrite their inputs.
            Reinplace()(program)
            peak = _free_kept_memory(program, self.memory_limit)
            if peak <= self.memory_limit:
                break
        return _Candidate(name, self._seconds(program), peak, _Arrangement.of(program))

    def _seconds(self, program: Program) -> float:
        played = play(program, self.costs, None)
        return played.ended - played.began

    def _fits(self, candidate: _Candidate) -> bool:
        return self.memory_limit is None or (candidate.peak or 0) <= self.memory_limit

    def _best(self, candidates: list[_Candidate]) -> _Candidate:
        fitting = [candidate for candidate in candidates if self._fits(candidate)]
        if not fitting:
            least = min(candidates, key=lambda candidate: candidate.peak or 0)
            raise _too_little(self.memory_limit or 0, least.peak or 0)
        shortest = min(candidate.seconds for candidate in fitting)
        return next(candidate for candidate in fitting if candidate.seconds <= shortest * (1 + EQUAL))

    def _report(self, program: Program, candidates: list[_Candidate], best: _Candidate) -> None:
        for candidate in candidates:
            fits = "" if self._fits(candidate) else f", peak {candidate.peak} bytes is above the memory limit"
            chosen = "chosen" if candidate is best else "not chosen"
            program.note("schedule", candidate.name, f"{chosen}: {candidate.seconds * 1e3:.3f} ms simulated{fits}")

    def _check_limit(self, program: Program) -> None:
        capacity = self.costs.cluster.device.memory_bytes
        if self.memory_limit is not None and self.memory_limit > capacity:
            log.warning(
                "memory_limit=%d is more than the %d bytes of the cluster's device (%s)",
                self.memory_limit,
                capacity,
                self.costs.cluster.device.name,
            )


@dataclass(frozen=True)
class _Candidate:
    name: str
    seconds: float
    peak: int | None
    arrangement: _Arrangement

    def apply(self, program: Program) -> bool:
        before = list(program.graph.nodes)
        self.arrangement.restore(program)
        return self.name != "unscheduled" or before != list(program.graph.nodes)


@dataclass(frozen=True)
class _Arrangement:
    """Order and schedule annotations of a graph, to come back to. Notes belong to it too."""

    order: tuple[fx.Node, ...]
    annotations: tuple[tuple[Any, ...], ...]
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, program: Program) -> _Arrangement:
        order = tuple(program.graph.nodes)
        return cls(order, tuple(_annotations(node) for node in order), tuple(program.notes))

    def restore(self, program: Program) -> None:
        reorder(program.graph, self.order)
        for node, values in zip(self.order, self.annotations, strict=True):
            details = info(node)
            node.target, details.sends, details.rest, details.next_step, details.kept = values
        program.notes[:] = self.notes


def _annotations(node: fx.Node) -> tuple[Any, ...]:
    details = info(node)
    return node.target, details.sends, details.rest, details.next_step, details.kept


def _free_kept_memory(program: Program, limit: int) -> int:
    """Let go of memory that is kept between steps, the largest first, until the step fits. Returns the peak."""
    peak = peak_memory(program)
    for node in sorted((node for node in program.graph.nodes if info(node).kept), key=_size, reverse=True):
        if peak <= limit:
            break
        info(node).kept = False
        program.note("memory cap", info(node).name, "its memory is not kept between steps: the limit leaves no room")
        peak = peak_memory(program)
    return peak


def _size(node: fx.Node) -> int:
    return tensor_spec(node).nbytes


def _too_little(limit: int, least: int) -> ConfigValueError:
    return ConfigValueError(
        f"ScheduleConfig.memory_limit={limit} is below what the step needs: {least} bytes ({least / 2**20:.1f} MiB) "
        "for parameters, optimizer state, gradients and activations, with communication held back as far as it goes; "
        "raise the limit, or make batch or model smaller"
    )
