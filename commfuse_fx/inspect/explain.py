"""Why the graph is as it is, for people."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.collectives import is_wait
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Note, Program
from commfuse_fx.ir.text import collective_text


@dataclass(frozen=True)
class CollectiveReport:
    """One collective: where it is started and waited for (positions in the graph), and what lies between.

    `compute_between`: number of compute nodes that run while it, or a first piece of it, is on the wire.
    `pieces`: into how many messages a large bucket is cut.
    """

    name: str
    description: str
    issued_at: int
    waited_at: int
    compute_between: int
    pieces: int = 1


@dataclass(frozen=True)
class Explanation:
    collectives: tuple[CollectiveReport, ...]
    flat_updates: tuple[str, ...]
    notes: tuple[Note, ...]

    def text(self) -> str:
        """A report in plain lines."""
        lines = [f"{len(self.collectives)} collective(s)"]
        for each in self.collectives:
            lines.append(f"  {each.name}: {each.description}")
            pieces = f", in {each.pieces} pieces" if each.pieces > 1 else ""
            lines.append(
                f"    issued at node {each.issued_at}{pieces}, waited for at node {each.waited_at}, "
                f"{each.compute_between} compute node(s) in between"
            )
        if self.flat_updates:
            lines.append("flat storage (updated as one tensor)")
            lines.extend(f"  {line}" for line in self.flat_updates)
        topics = dict.fromkeys(note.topic for note in self.notes)
        for topic in topics:
            lines.append(topic)
            lines.extend(f"  {note.subject}: {note.reason}" for note in self.notes if note.topic == topic)
        return "\n".join(lines) + "\n"


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).collective is None and not is_wait(node) and not is_view(node)


def explain(program: Program) -> Explanation:
    nodes = list(program.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    sends: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for start, _ in info(node).sends:
            sends.setdefault(start, []).append(node)
    reports: list[CollectiveReport] = []
    for start in program.collectives():
        details = info(start).collective
        assert details is not None
        wait = min((user for user in start.users), key=position.__getitem__)
        ahead = sends.get(start, [])
        issued = min([position[start], *(position[node] for node in ahead)])
        compute = sum(1 for n in nodes[issued + 1 : position[wait]] if _computes(n))
        text = f"{details.kind} {collective_text(details, program.mesh.size(details.group))}"
        pieces = len(ahead) + max(len(info(start).rest), 1)
        reports.append(CollectiveReport(info(start).name, text, issued, position[wait], compute, pieces))
    flat = [
        f"update.{owner}: {', '.join(name for name, _ in segment.members)} ({segment.numel} elements)"
        for owner, update in enumerate(program.updates)
        for segment in update.segments
        if segment.is_flat
    ]
    return Explanation(tuple(reports), tuple(flat), tuple(program.notes))
