"""Why the graph is as it is, and why communication is not hidden, for people."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import in_ms
from commfuse_fx.inspect.explain.rank_memory import RankMemory, rank_memory
from commfuse_fx.ir.core.collectives import collective_of, is_wait
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.placement import R
from commfuse_fx.ir.core.program import LAYOUT, Note, Program, Redistribution
from commfuse_fx.ir.text.write_text import collective_text
from commfuse_fx.planning.pipeline.pipeline import PassRecord
from commfuse_fx.sharding.dividing.axis import SEARCHED
from commfuse_fx.simulate.simulation import Simulation, simulate

WITHOUT_EFFECT = "options without effect"


@dataclass(frozen=True)
class CollectiveReport:
    """The report on one collective says when it runs and how much of it is hidden.

    name: of its start node.
    description: its kind, group, op, dtype, bytes and members.
    issued_at, waited_at: positions in the graph of its start, or of its first piece, and of its wait.
    compute_between: the number of compute nodes that run while it is on the wire.
    pieces: into how many messages a large bucket is cut.
    next_step: it is waited for in the following step, before the node of this name; "" if it is not.
    hidden: predicted seconds in flight behind compute.
    exposed: predicted seconds that the step stands still for it.
    reason: why the exposed part is not hidden; "" where nothing is exposed.
    """

    name: str
    description: str
    issued_at: int
    waited_at: int
    compute_between: int
    pieces: int = 1
    next_step: str = ""
    hidden: float = 0.0
    exposed: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of one parameter says how it lies on the mesh.

    name: of the parameter.
    placements: one text per group of mesh axes, each with who asks for it. Empty for a parameter that is whole
        on every rank and that no mark speaks of.
    """

    name: str
    placements: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is whole on every rank, and no mark speaks of it: at most a search does."""
        return all(each.startswith(f"{R} on ") and each.endswith(f": {SEARCHED}") for each in self.placements)

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.placements) or 'R'}"


@dataclass(frozen=True)
class Explanation:
    """An explanation says why a compiled graph is as it is, and why its communication is not hidden.

    collectives: a report on each, in issue order.
    flat_updates: the parameters that are updated as one tensor, one text per tensor.
    notes: what passes have decided, and why, and which options have no effect.
    simulation: the prediction that hidden and exposed times come from.
    cluster: what the times are predicted for.
    layouts: how the parameters of a divided step lie on the mesh.
    redistributions: changes of layout in a divided step, with the bytes of the tensor and who needs it so.
    passes: the passes that have changed the graph, with their times, where they were asked for.
    memory: the bytes of parameters, gradients and optimizer state that a rank holds, and what they would be if nothing
        were divided. `text` shows them where something is.
    """

    collectives: tuple[CollectiveReport, ...]
    flat_updates: tuple[str, ...]
    notes: tuple[Note, ...]
    simulation: Simulation
    cluster: str
    memory: RankMemory
    layouts: tuple[ParameterLayout, ...] = ()
    redistributions: tuple[Redistribution, ...] = ()
    passes: tuple[PassRecord, ...] = ()

    def text(self) -> str:
        """A report in plain lines."""
        step = self.simulation
        lines = [
            f"predicted step: {in_ms(step.step_seconds)} on {self.cluster}, {step.gap:.1%} above its lower bound of "
            f"{in_ms(step.bound_seconds)} ({step.bound_by}); exposed communication {in_ms(step.exposed_seconds)}, "
            f"peak memory {step.peak_memory / 2**20:.1f} MiB",
            f"{len(self.collectives)} collective(s)",
        ]
        for each in self.collectives:
            lines.append(f"  {each.name}: {each.description}")
            pieces = f", in {each.pieces} pieces" if each.pieces > 1 else ""
            place = f"before {each.next_step} of the next step" if each.next_step else f"at node {each.waited_at}"
            lines.append(
                f"    issued at node {each.issued_at}{pieces}, waited for {place}, "
                f"{each.compute_between} compute node(s) in between"
            )
            why = f": {each.reason}" if each.reason else ""
            lines.append(f"    {in_ms(each.hidden)} hidden, {in_ms(each.exposed)} exposed{why}")
        if self.flat_updates:
            lines.append("flat storage (updated as one tensor)")
            lines.extend(f"  {line}" for line in self.flat_updates)
        if self.layouts:
            lines.append("layouts (R whole, S(d) divided along dimension d, S(d;n) inside of each of n blocks)")
            lines.extend(f"  {each}" for each in self.layouts if not each.is_plain)
            plain = [each.name for each in self.layouts if each.is_plain]
            if plain:
                lines.append(f"  R, as nothing asks for parts of them: {', '.join(plain)}")
        if self.redistributions:
            lines.append("redistributions (P summands)")
            lines.extend(f"  {_redistribution(each)}" for each in self.redistributions)
        if self.memory.is_divided:
            lines.extend(self.memory.text().splitlines())
        topics = dict.fromkeys(note.topic for note in self.notes)
        for topic in topics:
            lines.append(topic)
            lines.extend(f"  {note.subject}: {note.reason}" for note in self.notes if note.topic == topic)
        if self.passes:
            lines.append("passes that changed the graph")
            lines.extend(
                f"  {each.name}: {in_ms(each.seconds)}, {each.nodes_before} -> {each.nodes_after} nodes"
                for each in self.passes
            )
        return "\n".join(lines) + "\n"


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).collective is None and not is_wait(node) and not is_view(node)


def _redistribution(each: Redistribution) -> str:
    return f"{each.name}: {each.have} -> {each.wanted} on {each.group}, {each.nbytes} bytes: {each.cause}"


def _layouts(program: Program) -> tuple[ParameterLayout, ...]:
    if not program.config.divides_graphs:
        return ()
    found: dict[str, list[str]] = {name: [] for name in program.params}
    for note in program.notes:
        if note.topic == LAYOUT:
            found[note.subject].append(note.reason)
    return tuple(ParameterLayout(name, tuple(reasons)) for name, reasons in found.items())


def explain(program: Program, costs: CostModel, label: str) -> Explanation:
    """Simulate the program with these costs, which `label` describes, and gather all that passes have noted."""
    simulation = simulate(program, costs)
    simulated = {each.name: each for each in simulation.collectives}
    nodes = list(program.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    # How many nodes before each place compute; `own`: without those that run in the next step.
    computing = list(accumulate((_computes(node) for node in nodes), initial=0))
    own = list(accumulate((_computes(node) and info(node).next_step is None for node in nodes), initial=0))
    sends: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for start, _ in info(node).sends:
            sends.setdefault(start, []).append(node)
    reports: list[CollectiveReport] = []
    for start in program.collectives():
        details = collective_of(start)
        wait = min((user for user in start.users), key=position.__getitem__)
        ahead = sends.get(start, [])
        issued = min([position[start], *(position[node] for node in ahead)])
        anchor = info(wait).next_step
        if anchor is None:
            compute = computing[position[wait]] - computing[issued + 1]
        else:  # over the end of the step, to the place in the next one
            compute = own[-1] - own[issued + 1] + own[position[anchor]]
        predicted = simulated[info(start).name]
        text = f"{details.kind} {collective_text(details, program.mesh.size(details.group))}"
        pieces = len(ahead) + max(len(info(start).rest), 1)
        reports.append(
            CollectiveReport(
                info(start).name,
                text,
                issued,
                position[wait],
                compute,
                pieces,
                "" if anchor is None else info(anchor).name,
                predicted.hidden,
                predicted.exposed,
                predicted.reason,
            )
        )
    flat = [
        f"update.{owner}: {', '.join(name for name, _ in segment.members)} ({segment.numel} elements)"
        for owner, update in enumerate(program.updates)
        for segment in update.segments
        if segment.is_flat
    ]
    idle = tuple(Note(WITHOUT_EFFECT, each.option, each.reason) for each in program.config.without_effect)
    notes = (*(note for note in program.notes if note.topic != LAYOUT), *idle)
    layouts, changes = _layouts(program), tuple(program.redistributions)
    memory = rank_memory(program, simulation.peak_memory)
    return Explanation(tuple(reports), tuple(flat), notes, simulation, label, memory, layouts, changes)
