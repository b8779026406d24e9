"""Invariants of a program, checked after the capture and every pass in tests and with COMMFUSE_VERIFY=1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.collectives import elements_to_send, is_start, is_wait, memory_on_wire, wait_of
from commfuse_fx.ir.core.declared_specs import check_declared_specs
from commfuse_fx.ir.core.dependence import Roots, is_opaque, is_view, written_nodes
from commfuse_fx.ir.core.meta import Stretch, has_info, info
from commfuse_fx.ir.core.program import Program


def verify(program: Program, after: str) -> None:
    """Raise VerificationError, naming pass, node and source line, where an invariant does not hold.

    program: the program to look at.
    after: the name of the pass that has made it, or "capture".
    """

    def fail(node: fx.Node, what: str) -> None:
        name = info(node).name if has_info(node) else node.name
        where = f" ({info(node).source})" if has_info(node) and info(node).source else ""
        raise VerificationError(f"after pass {after}: node {name}{where}: {what}")

    seen: dict[fx.Node, None] = {}
    names: dict[str, None] = {}
    calls: list[_Call] = []
    for node in program.graph.nodes:
        inputs = node.all_input_nodes
        for value in inputs:
            if value not in seen:
                fail(node, f"uses {value.name} before it is computed")
        seen[node] = None
        if not has_info(node):
            fail(node, "has no metadata")
        if node.op == "placeholder" and node not in program.sources:
            fail(node, "is an input without a source")
        if node.op == "output":
            if node.args[0] != program.returned:
                fail(node, "does not return what the program says")
            continue
        name = info(node).name
        if not name or name in names:
            fail(node, f"has the name {name!r}, which is empty or not unique")
        names[name] = None
        if node.op == "call_function":
            calls.append(_Call(node, inputs, is_view(node), written_nodes(node)))
        if is_start(node):
            try:
                wait_of(node)
            except LookupError as error:
                fail(node, str(error))
            if info(node).collective is None:
                fail(node, "starts a collective but carries no collective metadata")
    check_declared_specs(program, fail)
    roots = Roots(program.graph, program.aliases())
    _check_in_flight(calls, roots, fail)
    _check_pieces(calls, roots, fail)
    _check_next_step(calls, roots, fail)
    _check_once(program, calls, roots, fail)


class _Call(NamedTuple):
    """A node that calls something: what it is given, whether it only gives another view, and what it writes."""

    node: fx.Node
    inputs: list[fx.Node]
    is_view: bool
    written: list[fx.Node]


def _check_once(program: Program, calls: Sequence[_Call], roots: Roots, fail: Callable[[fx.Node, str], None]) -> None:
    """What is computed once needs nothing of a step, and its memory is neither written to nor handed out."""
    for node, inputs, _, written in calls:
        for value in inputs if info(node).once else ():
            if not (info(value).once or value.op == "get_attr"):
                fail(node, f"is computed once, but needs {info(value).name}, which is not")
        for value in written:
            if info(roots[value]).once:
                fail(node, f"writes to {info(roots[value]).name}, which is computed once")
    for value in program.output.all_input_nodes:
        if info(roots[value]).once:
            fail(value, "is computed once, and must not be handed out")


def _check_next_step(calls: Sequence[_Call], roots: Roots, fail: Callable[[fx.Node, str], None]) -> None:
    """What runs in the next step comes last, in the order of that step, before anything there that it may meet."""
    nodes = [call.node for call in calls]
    deferred = [node for node in nodes if info(node).next_step is not None]
    if not deferred:
        return
    if nodes[-len(deferred) :] != deferred:
        fail(deferred[0], "runs in the next step but stands before nodes that run in this one")
    position = {node: i for i, node in enumerate(nodes)}
    first_touch: dict[fx.Node, fx.Node] = {}
    first_write: dict[fx.Node, fx.Node] = {}
    for node, inputs, view, written in calls[: -len(deferred)]:
        for value in () if view else inputs:
            first_touch.setdefault(roots[value], node)
        for value in written:
            first_write.setdefault(roots[value], node)
    reached = -1
    for node, inputs, _, written in calls[-len(deferred) :]:
        anchor = info(node).next_step
        assert anchor is not None
        if position[anchor] < reached:
            fail(node, "runs in the next step before a node that stands before it here")
        reached = position[anchor]
        if is_opaque(node):
            fail(node, "runs in the next step, but nobody knows what it changes")
        if info(anchor).next_step is not None:
            fail(node, f"is to run before {info(anchor).name}, which is deferred itself")
        for value in written:
            met = first_touch.get(roots[value]) if roots[value].op == "placeholder" else None
            if met is not None and position[met] < position[anchor]:
                fail(node, f"changes what {info(met).name} of the next step reads before it has run")
        for value in inputs:
            memory = roots[value]
            if memory.op == "call_function" and info(memory).kept:
                met = first_write.get(memory)
                if met is not None and position[met] < position[anchor]:
                    fail(node, f"reads memory that {info(met).name} of the next step has overwritten")


def _check_pieces(calls: Sequence[_Call], roots: Roots, fail: Callable[[fx.Node, str], None]) -> None:
    """A piece of a bucket that is sent ahead of the start has been written before, and is not touched after."""
    buckets: dict[fx.Node, fx.Node] = {}  # storage -> its start, from the first piece to the start
    sent: dict[fx.Node, list[Stretch]] = {}
    for node, inputs, view, _ in calls:
        if view:
            continue
        for root in dict.fromkeys([roots[value] for value in inputs]) if buckets else ():
            start = buckets.get(root)
            if start is None or node is start:
                continue
            written = [stretch for write, stretch in info(start).writes if write is node]
            overlap = [s for s in sent[start] for w in written if w.begin < s.end and s.begin < w.end]
            if not written or overlap:
                fail(node, f"touches memory of {info(start).name} of which pieces are on the wire")
        for start, stretch in info(node).sends:
            buckets[roots[start.all_input_nodes[0]]] = start
            sent.setdefault(start, []).append(stretch)
        if is_start(node):
            buckets.pop(roots[node.all_input_nodes[0]], None)
            _check_coverage(node, [*sent.get(node, ()), *info(node).rest], fail)


def _check_coverage(start: fx.Node, pieces: list[Stretch], fail: Callable[[fx.Node, str], None]) -> None:
    """The pieces of a bucket are all of it, each element once."""
    reached = 0
    for stretch in sorted(pieces, key=lambda piece: piece.begin):
        if stretch.begin != reached:
            what = "sends nothing of" if stretch.begin > reached else "sends twice"
            low, high = sorted((reached, stretch.begin))
            fail(start, f"is sent in pieces, and {what} {Stretch(low, high)}")
        reached = stretch.end
    if pieces and reached != elements_to_send(start):
        fail(start, f"is sent in pieces that end at {reached} of {elements_to_send(start)} elements")


def _check_in_flight(calls: Sequence[_Call], roots: Roots, fail: Callable[[fx.Node, str], None]) -> None:
    """Between a start and its wait nobody may touch the memory that is on the wire."""
    flying: dict[fx.Node, fx.Node] = {}
    sending: dict[fx.Node, list[fx.Node]] = {}
    for node, inputs, view, written in calls:
        if is_wait(node):
            start = node.args[0]
            assert isinstance(start, fx.Node)
            flying.pop(roots[start], None)
            if (sent := memory_on_wire(node)) is not None:
                sending[roots[sent]].remove(start)
            continue
        for value in inputs if flying and not view else ():
            touched = flying.get(roots[value])
            if touched is not None:
                fail(node, f"touches memory of {info(touched).name} while it is on the wire")
        for value in written if sending else ():
            for start in sending.get(roots[value], ()):
                fail(node, f"writes to what {info(start).name} is sending")
        if is_start(node):
            flying[roots[node]] = node
            if (sent := memory_on_wire(wait_of(node))) is not None:
                sending.setdefault(roots[sent], []).append(node)
