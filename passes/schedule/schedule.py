"""Take the fastest of several arrangements of the graph, by simulation, among those that fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import fx

from commfuse_fx.cost.memory import Memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.ir.core.collectives import is_start, wait_of
from commfuse_fx.ir.core.dependence import Dependence, Roots
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Note, Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation, Variants
from commfuse_fx.passes.fuse.reinplace import reinplace
from commfuse_fx.passes.schedule.across_steps import AcrossSteps
from commfuse_fx.passes.schedule.issue_by_need import IssueByNeed
from commfuse_fx.passes.schedule.overlap import Overlap, can_start_late, start_late
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.simulate.rounds import play
from commfuse_fx.solvers.buckets.pieces import PIECE, SMALL_PIECE

log = logging.getLogger("commfuse_fx.passes.schedule")

LEADS = (0.5, 0.25, 0.1, 0.05, 0.02, 0.0)
"""How far ahead of its wait a collective that allocates memory may start, in parts of the step's compute time; tried in
this order until the step fits into the memory."""

EQUAL = 1e-9
"""Relative difference below which two simulated times count as the same."""


@dataclass(frozen=True)
class Schedule(PricedPass):
    """`memory_limit`: bytes that the step may have allocated at most. `across_steps`: updates may run in the next step.

    Bitwise neutral: the same ops on the same values, in another order.
    Raises TooLittleMemory when no arrangement fits.
    """

    name = "schedule"
    numerics = "reordered"
    needs_sizes = True
    requires = ("averaged", "split")
    ensures = ("scheduled",)

    memory_limit: int | None = None
    across_steps: bool = False

    @classmethod
    def when(cls, situation: Situation) -> Schedule | None:
        if not situation.by_cost or not situation.schedules:
            return None
        return cls(situation.config.memory_limit, situation.across_steps)

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        if not situation.across_steps:
            return found
        within = (each.but(across_steps=False) for each in found.searched)
        return replace(found, searched=(*found.searched, *within))

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        if self.memory_limit is not None:
            self._check_limit(context.costs)
        if not any(True for _ in program.collectives()):
            if self.memory_limit is not None:
                self._check_peak(program, context.costs)
            return False
        costs = context.costs.remembering()
        candidates = list(self._candidates(program, costs))
        if self.memory_limit is not None:
            candidates = self._within_limit(program, candidates, costs)
        best = self._best(program, candidates)
        modified = best.apply(program)
        self._report(program, candidates, best)
        return modified

    def _candidates(self, program: Program, costs: CostModel) -> Iterator[_Candidate]:
        """Every arrangement worth a look; what comes first wins where two are equally fast."""
        start = _Arrangement.of(program)
        context = PassContext(costs)
        Overlap()(program)
        overlapped = _Arrangement.of(program)
        if self.across_steps:
            if AcrossSteps()(program, context):
                yield self._judged("across steps", program, costs)
            else:  # the notes say why
                start, overlapped = (replace(each, notes=tuple(program.notes)) for each in (start, overlapped))
            overlapped.restore(program)
        yield self._judged("overlap", program, costs)
        overlapped.restore(program)
        if IssueByNeed()(program, context):
            yield self._judged("overlap, needed first goes first", program, costs)
            overlapped.restore(program)
        streamed: list[_Arrangement] = []
        for name, piece in (("large buckets in pieces", PIECE), ("large buckets in small pieces", SMALL_PIECE)):
            if StreamBuckets(piece)(program) and _Arrangement.of(program) not in streamed:
                streamed.append(_Arrangement.of(program))
                yield self._judged(f"overlap, {name}", program, costs)
            overlapped.restore(program)
        start.restore(program)
        yield self._judged("unscheduled", program, costs)
        start.restore(program)

    def _judged(self, name: str, program: Program, costs: CostModel) -> _Candidate:
        """What this arrangement takes, with as much memory as it wants."""
        return _Candidate(name, _seconds(program, costs), None, _Arrangement.of(program))

    def _within_limit(self, program: Program, candidates: Sequence[_Candidate], costs: CostModel) -> list[_Candidate]:
        """The candidates, those that may be the fastest one that fits as they are within the limit.

        A candidate that already takes longer than one that fits is left as it is: giving memory back makes none faster.
        """
        checked = list(candidates)
        *_, unscheduled = candidates
        fastest = inf
        for i in sorted(range(len(candidates)), key=lambda i: candidates[i].seconds):
            if candidates[i].seconds > fastest * (1 + EQUAL):
                break
            checked[i] = self._fitted(candidates[i], program, costs)
            if self._fits(checked[i]):
                fastest = min(fastest, checked[i].seconds)
        unscheduled.arrangement.restore(program)
        return checked

    def _fitted(self, candidate: _Candidate, program: Program, costs: CostModel) -> _Candidate:
        """What this arrangement takes with as much memory given back as it takes to fit, and its peak.

        Where it does not fit at all, the attempt with the least peak.
        """
        assert self.memory_limit is not None
        start = candidate.arrangement
        start.restore(program)
        roots = Roots(program.graph, program.aliases())
        leads = LEADS if can_start_late(program) else ()
        dependence: Dependence | None = None
        least: _Attempt | None = None
        for lead in (None, *leads):
            if lead is not None:
                start.restore(program)
                dependence = dependence or Dependence(program.graph, program.aliases())
                start_late(program, costs, lead, dependence)
            # What the step allocates depends on which ops will overwrite their inputs.
            reinplace(program, roots)
            peak, freed = _free_kept_memory(program, self.memory_limit)
            if least is None or peak < least.peak:  # a later start can need more
                least = _Attempt(peak, lead is None and not freed, _Arrangement.of(program))
            if peak <= self.memory_limit:
                break
        assert least is not None
        fitted = least.arrangement
        fitted.restore(program)
        if least.as_given:
            return _Candidate(candidate.name, candidate.seconds, least.peak, fitted)
        # Times are compared as without a limit, where ops do not overwrite their inputs yet.
        start.restore_ops()
        seconds = _seconds(program, costs)
        fitted.restore(program)
        return _Candidate(candidate.name, seconds, least.peak, fitted)

    def _fits(self, candidate: _Candidate) -> bool:
        """Whether it is within the limit, as far as that is known."""
        return self.memory_limit is None or candidate.peak is None or candidate.peak <= self.memory_limit

    def _best(self, program: Program, candidates: list[_Candidate]) -> _Candidate:
        fitting = [candidate for candidate in candidates if self._fits(candidate)]
        if not fitting:
            least = min(candidates, key=lambda candidate: candidate.peak or 0)
            raise TooLittleMemory.of(self.memory_limit or 0, least.peak or 0, program)
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

    def _check_peak(self, program: Program, costs: CostModel) -> None:
        """Raises TooLittleMemory when a step in which there is nothing to arrange does not fit."""
        candidate = self._judged("unscheduled", program, costs)
        fitted = self._fitted(candidate, program, costs)
        candidate.arrangement.restore(program)
        self._best(program, [fitted])

    def _check_limit(self, costs: CostModel) -> None:
        capacity = costs.cluster.device.memory_bytes
        if self.memory_limit is not None and self.memory_limit > capacity:
            log.warning(
                "memory_limit=%d is more than the %d bytes of the cluster's device (%s)",
                self.memory_limit,
                capacity,
                costs.cluster.device.name,
            )


@dataclass(frozen=True)
class _Candidate:
    """`peak`: bytes, None where nobody has looked."""

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
        for node, (*_, sends, rest, next_step, kept) in zip(self.order, self.annotations, strict=True):
            details = info(node)
            details.sends, details.rest, details.next_step, details.kept = sends, rest, next_step, kept
        self.restore_ops()
        program.notes[:] = self.notes

    def restore_ops(self) -> None:
        """What the nodes call, and nothing else."""
        for node, (target, kwargs, *_) in zip(self.order, self.annotations, strict=True):
            if node.target is not target:  # setting it is slow
                node.target = target
            if node.kwargs != kwargs:  # the memory that the op writes into
                node.kwargs = kwargs


@dataclass(frozen=True)
class _Attempt:
    """An arrangement that gives memory back. `peak`: bytes. `as_given`: nothing had to be given back."""

    peak: int
    as_given: bool
    arrangement: _Arrangement


def _annotations(node: fx.Node) -> tuple[Any, ...]:
    details = info(node)
    return node.target, node.kwargs, details.sends, details.rest, details.next_step, details.kept


def _leads(order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many nodes stand between each collective's start and its wait."""
    place = {node: i for i, node in enumerate(order)}
    return {node: place[wait_of(node)] - place[node] for node in order if is_start(node)}


def _seconds(program: Program, costs: CostModel) -> float:
    played = play(program, costs)
    return played.ended - played.began


def _free_kept_memory(program: Program, limit: int) -> tuple[int, bool]:
    """Let go of memory that is kept between steps, the largest first, until the step fits.

    Returns the peak, and whether any was let go.
    """
    memory = Memory(program)
    peak, freed = memory.peak(), False
    for node in sorted((node for node in program.graph.nodes if info(node).kept), key=_size, reverse=True):
        if peak <= limit:
            break
        memory.let_go(node)
        program.note("memory cap", info(node).name, "its memory is not kept between steps: the limit leaves no room")
        peak, freed = memory.peak(), True
    return peak, freed


def _size(node: fx.Node) -> int:
    return tensor_spec(node).nbytes
