"""Play the graph of a step, in its order, for one or several rounds.

One compute stream and one first-in-first-out stream per group. A node with `next_step` runs in the following
round, so such a graph is played until its rounds repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from commfuse_fx.cost.deferred import execution_order, is_deferred
from commfuse_fx.cost.engine import Engine, Transfer
from commfuse_fx.cost.model import CostModel
from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.program import Program

DEFERRED_ROUNDS = 4
"""Rounds to play at least where nodes run in the following step."""

MOST_ROUNDS = 32
"""Rounds after which a step that does not settle into a period is taken as it is."""


@dataclass(frozen=True)
class Piece:
    """One message of a collective: the whole payload, or a stretch of it."""

    start: fx.Node
    transfer: Transfer


@dataclass
class Flown:
    """One run of a collective: the engine's handles of its pieces, and when it was waited for (seconds)."""

    handles: list[int] = field(default_factory=list)
    wait_entered: float = 0.0
    wait_left: float = 0.0


@dataclass
class Played:
    """What was played, and what happened in the last round, in seconds since the first.

    order: the nodes as executed. seconds: of each node that computes. pieces: what goes onto the wire right
    after a node. began, ended: the last round. computed: (node, begin, end). flown: each collective that was waited
    for, in the order of waits; where nodes are deferred it may have started in the round before.
    """

    order: list[fx.Node]
    seconds: dict[fx.Node, float]
    pieces: dict[fx.Node, list[Piece]]
    engine: Engine
    began: float = 0.0
    ended: float = 0.0
    computed: list[tuple[fx.Node, float, float]] = field(default_factory=list)
    flown: dict[fx.Node, Flown] = field(default_factory=dict)

    @property
    def deferred(self) -> bool:
        return any(is_deferred(node) for node in self.order)


def pieces_of(program: Program, order: list[fx.Node], model: CostModel) -> dict[fx.Node, list[Piece]]:
    """What goes onto the wire right after each node has run, in the order of issue."""
    streamed = dict.fromkeys(start for node in order for start, _ in info(node).sends)
    found: dict[fx.Node, list[Piece]] = {}

    def add(node: fx.Node, start: fx.Node, stretch: Stretch | None) -> None:
        size = None if stretch is None else stretch.size * tensor_spec(start).itemsize
        found.setdefault(node, []).append(Piece(start, model.transfer_of(start, size, mesh=program.mesh)))

    for node in order:
        if is_start(node):
            for stretch in info(node).rest or ((None,) if node not in streamed else ()):
                add(node, node, stretch)
        for start, stretch in info(node).sends:
            add(node, start, stretch)
    return found


def play(program: Program, model: CostModel, steps: int | None = None) -> Played:
    """Play `steps` rounds (None: 1, or `DEFERRED_ROUNDS` where nodes run in the following step).

    Where nodes run in the following step, rounds are added until as much is on the wire at the end of the last
    one as at its begin, so that its length is that of every later step.
    Raises ConfigValueError for fewer than one step, VerificationError for a wait without a collective to wait for.
    """
    if steps is not None and steps < 1:
        raise ConfigValueError(f"steps={steps!r}: play at least 1 step")
    order = execution_order(program)
    pieces = pieces_of(program, order, model)
    waits: dict[fx.Node, fx.Node] = {node: node.args[0] for node in order if is_wait(node)}  # type: ignore[misc]
    seconds: dict[fx.Node, float] = {}
    for node in order:
        if node.op == "call_function" and node not in waits and not is_start(node):
            cost = model.compute_seconds(node)
            if cost:
                seconds[node] = cost
    played = Played(order, seconds, pieces, Engine())
    if not played.deferred:
        for number in range(steps or 1):
            _Round(played, waits, {}, number).run(order)
            played.ended = played.engine.drain()
        return played
    on_wire: dict[tuple[fx.Node, int], Flown] = {}
    _Round(played, waits, on_wire, 0).run([node for node in order if not is_deferred(node)])
    left = played.engine.outstanding()
    for number in range(1, max(steps or DEFERRED_ROUNDS, MOST_ROUNDS)):
        _Round(played, waits, on_wire, number).run(order)
        before, left = left, played.engine.outstanding()
        if number + 1 >= (steps or DEFERRED_ROUNDS) and _alike(before, left):
            break
    return played


def _alike(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[key] - other[key]) <= 1e-9 * one[key] for key in one)


class _Round:
    def __init__(
        self, played: Played, waits: dict[fx.Node, fx.Node], on_wire: dict[tuple[fx.Node, int], Flown], number: int
    ) -> None:
        self.played = played
        self.waits = waits
        self.on_wire = on_wire
        self.number = number

    def run(self, order: list[fx.Node]) -> None:
        played, waits = self.played, self.waits
        engine, seconds, pieces = played.engine, played.seconds, played.pieces
        played.began = engine.now
        computed = played.computed = []
        played.flown = {}
        for node in order:
            cost = seconds.get(node)
            if cost is not None:
                computed.append((node, *engine.run(cost)))
            elif node in waits:
                self._wait(node)
            if node in pieces:
                for piece in pieces[node]:
                    key = (piece.start, self._step_of(node))
                    self.on_wire.setdefault(key, Flown()).handles.append(engine.issue(piece.transfer))
        played.ended = engine.now

    def _wait(self, node: fx.Node) -> None:
        start = self.waits[node]
        flown = self.on_wire.pop((start, self._step_of(node)), None)
        if flown is None:
            raise VerificationError(
                f"{info(node).name} waits for {info(start).name} before that has been started: a collective that "
                "runs in the next step needs a wait that does too"
            )
        flown.wait_entered = self.played.engine.now
        for handle in flown.handles:
            self.played.engine.wait(handle)
        flown.wait_left = self.played.engine.now
        self.played.flown[start] = flown

    def _step_of(self, node: fx.Node) -> int:
        """The step that a node belongs to: this round's, or the one before."""
        return self.number - is_deferred(node)
