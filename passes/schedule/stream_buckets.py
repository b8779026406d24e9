"""Send a large bucket in pieces, each as soon as all its gradients are in.

A bucket of 64 MiB that leaves only when its last gradient is ready leaves nothing to hide behind. It
stays one collective of the graph (one start, one wait, one entry in its group's order), but stretches of
its flat storage that are complete go onto the wire ahead of the start; the start sends the rest. Where
a stretch is complete follows from the graph alone, so all ranks cut alike.

Gloo hands what an all_gather or an all_to_all sends to a neighbour to the network at once, and a large message leaves
the wire idle for a part of its time: at 1 Gbit/s 64 MiB take 1.5 to 2 times as long as in pieces. So on CPUs these are
sent in pieces even where all of it is ready. A backend of GPUs cuts messages itself.

Why: docs/decisions.md, "A large bucket leaves in pieces".
Why: docs/decisions.md, "Rows leave in pieces, on CPUs".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.collectives import elements_to_send, tables_of
from commfuse_fx.ir.core.member_ops import cut
from commfuse_fx.ir.core.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.solvers.buckets.pieces import FIRST_PIECE, PIECE, ROWS_PIECE


@dataclass(frozen=True)
class StreamBuckets(Pass):
    """Bitwise neutral for groups of two; else within reduction order, because a ring cuts pieces elsewhere.

    piece: bytes from which a complete stretch is worth a message of its own.
    first: bytes from which the first one of the step is: it ends the time in which the wire has nothing to carry.
    rows: bytes of a piece where ranks give or get rows, those of one rank.
    """

    name = "stream_buckets"
    numerics = "reordered"
    requires = ("scheduled",)

    piece: int = PIECE
    first: int = FIRST_PIECE
    rows: int = ROWS_PIECE

    @classmethod
    def when(cls, situation: Situation) -> StreamBuckets | None:
        return cls() if situation.schedules and not situation.by_cost else None

    def __call__(self, program: Program) -> bool:
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        filled = [node for node in program.collectives() if info(node).writes]
        first = min(filled, key=lambda start: min(position[write] for write, _ in info(start).writes), default=None)
        streamed = False
        for start in program.collectives():
            tables, itemsize = tables_of(start), tensor_spec(start).itemsize
            piece = (self.piece if tables is None else self.rows) // itemsize
            least = min(self.first // itemsize, piece) if start is first else piece
            if not (tables is None or tensor_spec(start).device == "cpu") or elements_to_send(start) <= least:
                continue
            ahead, rest = self._complete(start, position, least, piece)
            if tables is not None:
                ahead = [(write, part) for write, each in ahead for part in cut(tables.sizes, each, piece)]
                rest = [part for each in rest for part in cut(tables.sizes, each, piece)]
            if len(ahead) + len(rest) > 1:
                for write, stretch in ahead:
                    info(write).sends = (*info(write).sends, (start, stretch))
                info(start).rest = tuple(rest)
                streamed = True
        return streamed

    def _complete(
        self, start: fx.Node, position: dict[fx.Node, int], least: int, piece: int
    ) -> tuple[list[tuple[fx.Node, Stretch]], list[Stretch]]:
        """What can leave ahead of the start, behind which nodes, and what is left for it.

        least: elements of the first piece. piece: those of the others.
        """
        complete = _Stretches()
        enough = least
        ahead: list[tuple[fx.Node, Stretch]] = []
        for write, stretch in sorted(info(start).writes, key=lambda entry: position[entry[0]]):
            grown = complete.add(stretch)
            if grown.size >= enough:
                complete.remove(grown)
                ahead.append((write, grown))
                enough = piece
        rest = complete.sorted()
        # Many small remainders would cost more than streaming gains.
        if not ahead or len(rest) > len(ahead) + 2:
            return [], [Stretch(0, elements_to_send(start))]
        if not rest:
            rest = [ahead.pop()[1]]  # the start sends something in any case
        return ahead, rest


class _Stretches:
    """Complete stretches that have not been sent, merged with their neighbours."""

    def __init__(self) -> None:
        self._by_begin: dict[int, Stretch] = {}
        self._by_end: dict[int, Stretch] = {}

    def add(self, stretch: Stretch) -> Stretch:
        """Returns the stretch grown by the neighbours it touches."""
        before, after = self._by_end.get(stretch.begin), self._by_begin.get(stretch.end)
        for neighbour in (before, after):
            if neighbour is not None:
                self.remove(neighbour)
        grown = Stretch(before.begin if before else stretch.begin, after.end if after else stretch.end)
        self._by_begin[grown.begin] = self._by_end[grown.end] = grown
        return grown

    def remove(self, stretch: Stretch) -> None:
        del self._by_begin[stretch.begin]
        del self._by_end[stretch.end]

    def sorted(self) -> list[Stretch]:
        return [self._by_begin[begin] for begin in sorted(self._by_begin)]
