"""The cost-based schedule: of several arrangements of one graph the fastest, by simulation, that fits into memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from commfuse_fx.cost.memory import Memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.rounds import play
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.collectives import is_start, wait_of
from commfuse_fx.ir.dependence import Dependence, Roots
from commfuse_fx.ir.meta import info, tensor_spec
from commfuse_fx.ir.order import reorder
from commfuse_fx.ir.program import Note, Program
from commfuse_fx.passes.across_steps import AcrossSteps
from commfuse_fx.passes.issue_by_need import IssueByNeed
from commfuse_fx.passes.overlap import Overlap, can_start_late, start_late
from commfuse_fx.passes.reinplace import reinplace
from commfuse_fx.passes.stream_buckets import StreamBuckets

log = logging.getLogger("commfuse_fx.passes.schedule")

LEADS = (0.5, 0.25, 0.1, 0.05, 0.02, 0.0)
"""How far ahead of its wait a collective that allocates memory may start, in parts of the step's compute time; tried in
this order until the step fits into the memory."""

EQUAL = 1e-9
"""Relative difference below which two simulated times count as the same."""


@dataclass(frozen=True)
class Schedule:
    """`memory_limit`: bytes that the step may have allocated at most. `across_steps`: updates may run in the next step.

    Bitwise neutral: the same ops on the same values, in another order.
    Raises TooLittleMemory when no arrangement fits.
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
            if self.memory_limit is not None:
                self._check_peak(program)
            return False
        candidates = list(self._candidates(program))
        best = self._best(candidates)
        modified = best.apply(program)
        self._report(program, candidates, best)
        return modified

    def _candidates(self, program: Program) -> Iterator[_Candidate]:
        """Every arrangement worth a look; what comes first wins where two are equally fast."""
        costs = self.costs.remembering()
        start = _Arrangement.of(program)
        Overlap()(program)
        overlapped = _Arrangement.of(program)
        if self.across_steps:
            if AcrossSteps(costs)(program):
                yield self._judged("across steps", program, costs)
            else:  # the notes say why
                start, overlapped = (replace(each, notes=tuple(program.notes)) for each in (start, overlapped))
            overlapped.restore(program)
        yield self._judged("overlap", program, costs)
        overlapped.restore(program)
        if IssueByNeed(costs)(program):
            yield self._judged("overlap, needed first goes first", program, costs)
            overlapped.restore(program)
        if StreamBuckets()(program):
            yield self._judged("overlap, large buckets in pieces", program, costs)
        start.restore(program)
        yield self._judged("unscheduled", program, costs)
        start.restore(program)

    def _judged(self, name: str, program: Program, costs: CostModel) -> _Candidate:
        """What this arrangement takes; where it does not fit, with as much memory given back as it takes to fit."""
        if self.memory_limit is None:
            return _Candidate(name, _seconds(program, costs), None, _Arrangement.of(program))
        start = _Arrangement.of(program)
        roots = Roots(program.graph, program.aliases())
        leads = LEADS if can_start_late(program) else ()
        dependence: Dependence | None = None
        peak = 0
        for lead in (None, *leads):
            start.restore(program)
            if lead is not None:
                dependence = dependence or Dependence(program.graph, program.aliases())
                start_late(program, costs, lead, dependence)
            # What the step allocates depends on which ops will overwrite their inputs.
            reinplace(program, roots)
            peak = _free_kept_memory(program, self.memory_limit)
            if peak <= self.memory_limit:
                break
        return _Candidate(name, _seconds(program, costs), peak, _Arrangement.of(program))

    def _fits(self, candidate: _Candidate) -> bool:
        return self.memory_limit is None or (candidate.peak or 0) <= self.memory_limit

    def _best(self, candidates: list[_Candidate]) -> _Candidate:
        fitting = [candidate for candidate in candidates if self._fits(candidate)]
        if not fitting:
            least = min(candidates, key=lambda candidate: candidate.peak or 0)
            raise TooLittleMemory(self.memory_limit or 0, least.peak or 0)
        shortest = min(candidate.seconds for candidate in fitting)
        return next(candidate for candidate in fitting if candidate.seconds <= shortest * (1 + EQUAL))

    def _report(self, program: Program, candidates: list[_Candidate], best: _Candidate) -> None:
        for candidate in candidates:
            fits = "" if self._fits(candidate) else f", peak {candidate.peak} bytes is above the memory limit"
            chosen = "chosen" if candidate is best else "not chosen"
            program.note("schedule", candidate.name, f"{chosen}: {candidate.seconds * 1e3:.3f} ms simulated{fits}")
        faster = [c for c in candidates if c.seconds < best.seconds and not self._fits(c)]
        if faster:
            self._report_cap(program, min(faster, key=lambda candidate: candidate.seconds))

    def _report_cap(self, program: Program, wanted: _Candidate) -> None:
        """Name the collectives that an arrangement which does not fit would have started earlier."""
        noted = dict.fromkeys(note.subject for note in program.notes if note.topic == "memory cap")
        have, want = _leads(list(program.graph.nodes)), _leads(wanted.arrangement.order)
        for start, lead in have.items():
            if lead < want[start] and info(start).name not in noted:
                reason = f'the arrangement "{wanted.name}" starts it earlier, and needs {wanted.peak} bytes'
                program.note("memory cap", info(start).name, reason)

    def _check_peak(self, program: Program) -> None:
        """Raises TooLittleMemory when a step in which there is nothing to arrange does not fit."""
        start = _Arrangement.of(program)
        candidate = self._judged("unscheduled", program, self.costs)
        start.restore(program)
        self._best([candidate])

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
        before, after = _Arrangement.of(program), self.arrangement
        after.restore(program)
        return (before.order, before.annotations) != (after.order, after.annotations)


@dataclass(frozen=True)
class _Arrangement:
    """Order and schedule annotations of a graph, to come back to. Notes belong to it too."""

    order: tuple[fx.Node, ...]
    annotations: tuple[tuple[Any, ...], ...]
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, program: Program) -> _Arrangement:
        order = tuple(program.graph.nodes)
        return cls(order, tuple([_annotations(node) for node in order]), tuple(program.notes))

    def restore(self, program: Program) -> None:
        reorder(program.graph, self.order)
        for node, (target, sends, rest, next_step, kept) in zip(self.order, self.annotations, strict=True):
            details = info(node)
            details.sends, details.rest, details.next_step, details.kept = sends, rest, next_step, kept
            if node.target is not target:  # setting it is slow
                node.target = target
        program.notes[:] = self.notes


def _annotations(node: fx.Node) -> tuple[Any, ...]:
    details = info(node)
    return node.target, details.sends, details.rest, details.next_step, details.kept


def _leads(order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many nodes stand between each collective's start and its wait."""
    place = {node: i for i, node in enumerate(order)}
    return {node: place[wait_of(node)] - place[node] for node in order if is_start(node)}


def _seconds(program: Program, costs: CostModel) -> float:
    played = play(program, costs)
    return played.ended - played.began


def _free_kept_memory(program: Program, limit: int) -> int:
    """Let go of memory that is kept between steps, the largest first, until the step fits. Returns the peak."""
    memory = Memory(program)
    peak = memory.peak()
    for node in sorted((node for node in program.graph.nodes if info(node).kept), key=_size, reverse=True):
        if peak <= limit:
            break
        memory.let_go(node)
        program.note("memory cap", info(node).name, "its memory is not kept between steps: the limit leaves no room")
        peak = memory.peak()
    return peak


def _size(node: fx.Node) -> int:
    return tensor_spec(node).nbytes


class TooLittleMemory(ConfigValueError):
    """No arrangement fits; `needed`: bytes of the one that needs least."""

    def __init__(self, limit: int, needed: int) -> None:
        super().__init__(
            f"ScheduleConfig.memory_limit={limit} is below what the step needs: {needed} bytes "
            f"({needed / 2**20:.1f} MiB) for parameters, optimizer state, gradients and activations, with "
            "communication held back as far as it goes; raise the limit, or make batch or model smaller"
        )
        self.needed = needed
