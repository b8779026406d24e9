"""A compiled step as plain data: what the report shows, and nothing of how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.inspect.explain.compiled_graph import CompiledGraph
from commfuse_fx.inspect.explain.explanation import Explanation
from commfuse_fx.inspect.report.collective_rows import CollectiveRow, Total, collective_rows, totals
from commfuse_fx.inspect.report.fusion import Fusion, fusion
from commfuse_fx.inspect.report.lanes import Lane, measured_lanes, predicted_lanes, seconds
from commfuse_fx.inspect.report.layouts import LayoutPicture, layout_picture
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import header, spec_text
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.planning.compiled import Snapshot


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of the final graph, in its order.

    path: the groups that it lies in, below its phase. inputs: positions of the nodes it takes. seconds: predicted
    compute time. sent: payload in bytes of the collective that it starts. line: its line of the canonical text.
    """

    name: str
    op: str
    phase: str
    path: tuple[str, ...]
    value: str
    inputs: tuple[int, ...]
    seconds: float
    sent: int
    line: str


@dataclass(frozen=True)
class Prediction:
    """Seconds, and bytes of memory. gap: 0.1 is 10 % above the bound."""

    step: float
    compute: float
    exposed: float
    bound: float
    bound_by: str
    gap: float
    peak_memory: int


@dataclass(frozen=True)
class StageRow:
    """The program after one pass."""

    name: str
    modified: bool
    nodes: int
    collectives: int


@dataclass(frozen=True)
class NoteRow:
    """One remark of a pass."""

    topic: str
    subject: str
    reason: str


@dataclass(frozen=True)
class ReportData:
    """All that the page shows, in its order."""

    header: tuple[tuple[str, str], ...]
    fingerprint: str
    cluster: str
    prediction: Prediction
    totals: tuple[Total, ...]
    layouts: LayoutPicture | None
    nodes: tuple[NodeRow, ...]
    collectives: tuple[CollectiveRow, ...]
    lanes: tuple[Lane, ...]
    measured: tuple[Lane, ...]
    fusion: Fusion
    stages: tuple[StageRow, ...]
    notes: tuple[NoteRow, ...]


def report_data(graph: CompiledGraph, cluster: Any, measured: Timeline | None) -> ReportData:
    """Gather it. Raises what `Lowered.simulate` raises for a bad cluster."""
    program = graph.program
    explanation = graph.explain(cluster)
    simulation = explanation.simulation
    position = {info(node).name: i for i, node in enumerate(program.graph.nodes)}
    first_issue = min((each.issued for each in simulation.collectives), default=0.0)
    stages = graph.stages
    rows = collective_rows(graph.collectives, explanation, program, position)
    return ReportData(
        header=tuple(header(program)),
        fingerprint=graph.fingerprint,
        cluster=explanation.cluster,
        prediction=Prediction(
            seconds(simulation.step_seconds),
            seconds(simulation.compute_seconds),
            seconds(simulation.exposed_seconds),
            seconds(simulation.bound_seconds),
            simulation.bound_by,
            round(simulation.gap, 6),
            simulation.peak_memory,
        ),
        totals=totals(rows),
        layouts=layout_picture(program),
        nodes=_nodes(program, explanation, graph.text(), position),
        collectives=rows,
        lanes=predicted_lanes(simulation, position),
        measured=() if measured is None else measured_lanes(measured, position, first_issue),
        fusion=fusion(program, stages),
        stages=_stages(stages),
        notes=_notes(explanation),
    )


def group_path(node: fx.Node, program: Program) -> tuple[str, ...]:
    """Where a node lies below its phase: its module path, or the bucket, update or pass that its name begins with."""
    details = info(node)
    if details.module:
        return tuple(details.module.split("."))
    source = program.sources.get(node)
    if source is None:
        maker = details.name.partition("/")[0] if "/" in details.name else ""
        return (maker,) if maker else ()
    if source.owner >= 0:
        return (f"update.{source.owner}",)
    return tuple(source.name.split(".")[:-1]) if source.kind in ("parameter", "buffer") else ()


def node_op(node: fx.Node, program: Program) -> str:
    """What a node does: the op of a call, the source of an input."""
    if node.op == "call_function":
        return op_name(node.target)
    if node.op == "placeholder":
        return program.sources[node].kind
    return {"get_attr": "constant", "output": "return"}.get(node.op, node.op)


def _nodes(program: Program, explanation: Explanation, text: str, position: Mapping[str, int]) -> tuple[NodeRow, ...]:
    spent: dict[str, float] = {}
    for event in explanation.simulation.events:
        if event.kind == "compute":
            spent[event.node] = spent.get(event.node, 0.0) + event.end - event.begin
    nodes = list(program.graph.nodes)
    lines = text.removesuffix("\n").split("\n")[len(header(program)) :]
    if len(lines) != len(nodes):  # A name holds a line break.
        lines = [""] * len(nodes)
    rows = []
    for node, line in zip(nodes, lines, strict=True):
        details = info(node)
        rows.append(
            NodeRow(
                details.name or "return",
                node_op(node, program),
                details.phase,
                group_path(node, program),
                spec_text(details.spec),
                tuple(position[info(value).name] for value in node.all_input_nodes),
                seconds(spent.get(details.name, 0.0)),
                0 if details.collective is None else details.collective.nbytes,
                line,
            )
        )
    return tuple(rows)


def _stages(stages: Mapping[str, Snapshot]) -> tuple[StageRow, ...]:
    return tuple(
        StageRow(name, each.modified, _line_count(each.text()), len(each.collectives)) for name, each in stages.items()
    )


def _line_count(text: str) -> int:
    return sum(1 for line in text.split("\n") if line and not line.startswith("# "))


def _notes(explanation: Explanation) -> tuple[NoteRow, ...]:
    rows = [NoteRow("layouts", each.name, "; ".join(each.placements)) for each in explanation.layouts]
    rows = [row for row in rows if row.reason]
    rows.extend(
        NoteRow("redistributions", each.name, f"{each.have} -> {each.wanted} on {each.group}: {each.cause}")
        for each in explanation.redistributions
    )
    rows.extend(NoteRow(note.topic, note.subject, note.reason) for note in explanation.notes)
    return tuple(rows)
