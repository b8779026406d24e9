"""The collectives of the report: what each does, when, and why it is not hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commfuse_fx.inspect.explain.explanation import CollectiveReport, Explanation
from commfuse_fx.inspect.explain.writers import writers
from commfuse_fx.inspect.report.lanes import seconds
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import dtype_name, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.compiled import Collective
from commfuse_fx.simulate.events import SimulatedCollective


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of the final graph.

    node, issued_at, waited_at: positions in the graph. after: positions of the nodes that write into the memory it
    sends. size: ranks in its group. bytes: payload. issued, begin, end, wait_entered, wait_left: predicted seconds
    since the step began. hidden, exposed: predicted seconds.
    """

    name: str
    node: int
    after: tuple[int, ...]
    kind: str
    op: str
    dtype: str
    phase: str
    axes: str
    ranks: str
    size: int
    bytes: int
    members: tuple[str, ...]
    fusion_id: int | None
    issued_at: int
    waited_at: int
    compute_between: int
    pieces: int
    next_step: str
    issued: float
    begin: float
    end: float
    wait_entered: float
    wait_left: float
    hidden: float
    exposed: float
    reason: str


@dataclass(frozen=True)
class Total:
    """Collectives of one kind in one phase: how many, and their payload in bytes."""

    kind: str
    phase: str
    count: int
    bytes: int


def collective_rows(
    collectives: Sequence[Collective], explanation: Explanation, program: Program, position: Mapping[str, int]
) -> tuple[CollectiveRow, ...]:
    """All collectives, in issue order. position: of nodes in the graph, by name."""
    simulated = {each.name: each for each in explanation.simulation.collectives}
    written_by = writers(program)
    rows = []
    for start, each, report in zip(program.collectives(), collectives, explanation.collectives, strict=True):
        details = collective_of(start)
        after = [position[info(node).name] for node in written_by[start]]
        rows.append(_collective(each, report, details.group, simulated[report.name], position[report.name], after))
    return tuple(rows)


def _collective(
    each: Collective, report: CollectiveReport, axes: str, times: SimulatedCollective, node: int, after: Sequence[int]
) -> CollectiveRow:
    return CollectiveRow(
        name=report.name,
        node=node,
        after=tuple(after),
        kind=each.kind,
        op=each.reduce_op or "",
        dtype=dtype_name(each.dtype),
        phase=each.phase,
        axes=axes,
        ranks=ranks_text(each.group),
        size=len(each.group),
        bytes=each.bytes,
        members=tuple(each.members),
        fusion_id=each.fusion_id,
        issued_at=report.issued_at,
        waited_at=report.waited_at,
        compute_between=report.compute_between,
        pieces=report.pieces,
        next_step=report.next_step,
        issued=seconds(times.issued),
        begin=seconds(times.begin),
        end=seconds(times.end),
        wait_entered=seconds(times.wait_entered),
        wait_left=seconds(times.wait_left),
        hidden=seconds(times.hidden),
        exposed=seconds(times.exposed),
        reason=times.reason,
    )


def totals(rows: Sequence[CollectiveRow]) -> tuple[Total, ...]:
    """By kind and phase, in the order of the first of each."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        found.setdefault((row.kind, row.phase), []).append(row.bytes)
    return tuple(Total(kind, phase, len(sizes), sum(sizes)) for (kind, phase), sizes in found.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in few words: `0-7`, `0-56 step 8`, `0-1, 4-5`."""
    if len(ranks) > 3:
        step = ranks[1] - ranks[0]
        if step > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]} step {step}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
