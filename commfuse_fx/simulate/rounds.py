"""Play the graph of a step, in its order, for one or several rounds.

One compute stream and one stream per group, in order of issue. A node with `next_step` runs in the following
round, so such a graph is played until its rounds repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import alike
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.ir.core.collectives import WAIT, bytes_of_piece, is_start
from commfuse_fx.ir.core.meta import Stretch, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import execution_order, is_deferred
from commfuse_fx.simulate.engine import Engine

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


@dataclass(slots=True)
class _Act:
    """What a node does in a round: compute, wait for a collective, send; or none of these.

    seconds: None where it computes nothing. deferred: it belongs to the step before.
    """

    node: fx.Node
    deferred: bool
    seconds: float | None
    waited: fx.Node | None
    pieces: tuple[Piece, ...]


@dataclass
class Played:
    """What was played, and what happened in the last round, in seconds since the first.

    order: the nodes as executed. seconds: of each node that computes. pieces: what goes onto the wire right
    after a node. began, ended: the last round. computed: (node, begin, end). issued: (start, number of the piece,
    begin, end) of messages that take time to hand over. flown: each collective that was waited for, in the order of
    waits; where nodes are deferred it may have started in the round before. deferred: nodes run in the following
    step. message: seconds of compute to hand over one message.
    """

    order: list[fx.Node]
    seconds: dict[fx.Node, float]
    pieces: dict[fx.Node, list[Piece]]
    engine: Engine
    began: float = 0.0
    ended: float = 0.0
    computed: list[tuple[fx.Node, float, float]] = field(default_factory=list)
    issued: list[tuple[fx.Node, int, float, float]] = field(default_factory=list)
    flown: dict[fx.Node, Flown] = field(default_factory=dict)
    deferred: bool = False
    message: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """Of a round: its nodes, and handing over its messages."""
        messages = sum(len(pieces) for pieces in self.pieces.values())
        return sum(self.seconds.values()) + messages * self.message


def pieces_of(program: Program, order: list[fx.Node], model: CostModel) -> dict[fx.Node, list[Piece]]:
    """What goes onto the wire right after each node has run, in the order of issue."""
    infos = [info(node) for node in order]
    streamed = dict.fromkeys([start for details in infos for start, _ in details.sends])
    found: dict[fx.Node, list[Piece]] = {}

    def add(node: fx.Node, start: fx.Node, stretch: Stretch | None) -> None:
        size = None if stretch is None else bytes_of_piece(start, stretch)
        found.setdefault(node, []).append(Piece(start, model.transfer_of(start, size, mesh=program.mesh)))

    for node, details in zip(order, infos, strict=True):
        if details.collective is not None and is_start(node):
            for stretch in details.rest or ((None,) if node not in streamed else ()):
                add(node, node, stretch)
        for start, stretch in details.sends:
            add(node, start, stretch)
    return found


def play(program: Program, model: CostModel, steps: int | None = None) -> Played:
    """Play `steps` rounds (None: 1, or `DEFERRED_ROUNDS` where nodes run in the following step).

    Where nodes run in the following step, rounds are added until as much is on the wire at the end of the last
    one as at its begin, so that its length is that of every later step. So they are, if `steps` is None, where a
    network has bursts, until links may carry as much of them as before.
    Raises ConfigValueError for fewer than one step, VerificationError for a wait without a collective to wait for.
    """
    if steps is not None and steps < 1:
        raise ConfigValueError(f"steps={steps!r}: play at least 1 step")
    order = execution_order(program)
    pieces = pieces_of(program, order, model)
    deferred = any(is_deferred(node) for node in order)
    message = model.cluster.device.collective_overhead
    played = Played(order, {}, pieces, Engine(), deferred=deferred, message=message)
    acts = _acts(played, model)
    _spread(model.step_overhead, played, acts)
    if not played.deferred:
        for number in range(steps or MOST_ROUNDS):
            before = played.engine.allowances()
            _Round(played, {}, number).run(acts)
            played.ended = played.engine.drain()
            if steps is None and alike(before, played.engine.allowances()):
                break
        return played
    on_wire: dict[tuple[fx.Node, int], Flown] = {}
    _Round(played, on_wire, 0).run([act for act in acts if not act.deferred])
    left = _state(played.engine)
    for number in range(1, max(steps or DEFERRED_ROUNDS, MOST_ROUNDS)):
        _Round(played, on_wire, number).run(acts)
        before, left = left, _state(played.engine)
        if number + 1 >= (steps or DEFERRED_ROUNDS) and alike(before, left):
            break
    return played


def _acts(played: Played, model: CostModel) -> list[_Act]:
    """Of the nodes that do anything, in order; their seconds are noted in `played`."""
    acts: list[_Act] = []
    for node in played.order:
        if node.op != "call_function":
            continue
        seconds: float | None = None
        waited: fx.Node | None = None
        if node.target is WAIT:
            waited = node.args[0]  # type: ignore[assignment]
        else:
            seconds = model.compute_seconds(node) or None
            if seconds is not None:
                played.seconds[node] = seconds
        pieces = tuple(played.pieces.get(node, ()))
        if seconds is not None or waited is not None or pieces:
            acts.append(_Act(node, played.deferred and is_deferred(node), seconds, waited, pieces))
    return acts


def _spread(overhead: float, played: Played, acts: Sequence[_Act]) -> None:
    """Let what a step takes besides its nodes pass in all of them alike. In one place it would hide communication that
    has nothing to hide behind: it is for the most part nodes that take longer than one by one."""
    total = sum(played.seconds.values())
    if not overhead or not total:
        return
    stretch = 1.0 + overhead / total
    for act in acts:
        if act.seconds is not None:
            act.seconds *= stretch
            played.seconds[act.node] = act.seconds


def _state(engine: Engine) -> dict[str, float]:
    return {**engine.outstanding(), **engine.allowances()}


class _Round:
    def __init__(self, played: Played, on_wire: dict[tuple[fx.Node, int], Flown], number: int) -> None:
        self.played = played
        self.on_wire = on_wire
        self.number = number

    def run(self, acts: list[_Act]) -> None:
        played, engine = self.played, self.played.engine
        played.began = engine.now
        computed = played.computed = []
        issued = played.issued = []
        played.flown = {}
        for act in acts:
            if act.seconds is not None:
                computed.append((act.node, *engine.run(act.seconds)))
            elif act.waited is not None:
                self._wait(act.node, act.waited, self._step_of(act))
            for piece in act.pieces:
                flown = self.on_wire.setdefault((piece.start, self._step_of(act)), Flown())
                if played.message:
                    issued.append((piece.start, len(flown.handles), *engine.run(played.message)))
                flown.handles.append(engine.issue(piece.transfer))
        played.ended = engine.now

    def _wait(self, node: fx.Node, start: fx.Node, step: int) -> None:
        flown = self.on_wire.pop((start, step), None)
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

    def _step_of(self, act: _Act) -> int:
        """The step that an act belongs to: this round's, or the one before."""
        return self.number - act.deferred
