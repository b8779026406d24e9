"""Send a large bucket in pieces, each as soon as all its gradients are in.

A bucket of 64 MiB that leaves only when its last gradient is ready leaves nothing to hide behind. It
stays one collective of the graph (one start, one wait, one entry in its group's order), but stretches of
its flat storage that are complete go onto the wire ahead of the start; the start sends the rest. Where
a stretch is complete follows from the graph alone, so all ranks cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.program import Program
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.solvers.pieces import FIRST_PIECE, PIECE


@dataclass(frozen=True)
class StreamBuckets(Pass):
    """`piece`: bytes from which a complete stretch is worth a message of its own. `first`: bytes from which the first
    one of the step is: it ends the time in which the wire has nothing to carry.

    Bitwise neutral for groups of two; else within reduction order, because a ring cuts pieces elsewhere.
    """

    name = "stream_buckets"
    numerics = "reordered"
    requires = ("scheduled",)

    piece: int = PIECE
    first: int = FIRST_PIECE

    @classmethod
    def when(cls, situation: Situation) -> StreamBuckets | None:
        return cls() if situation.schedules and not situation.by_cost else None

    def __call__(self, program: Program) -> bool:
        buckets = [node for node in program.collectives() if info(node).writes]
        if not buckets:
            return False
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        first = min(buckets, key=lambda start: min(position[write] for write, _ in info(start).writes))
        streamed = False
        for start in buckets:
            least = min(self.first, self.piece) if start is first else self.piece
            if tensor_spec(start).nbytes > least:
                streamed |= self._stream(start, position, least)
        return streamed

    def _stream(self, start: fx.Node, position: dict[fx.Node, int], least: int) -> bool:
        """`least`: bytes of the first piece."""
        complete = _Stretches()
        itemsize = tensor_spec(start).itemsize
        enough = least // itemsize
        sent: list[tuple[fx.Node, Stretch]] = []
        for write, stretch in sorted(info(start).writes, key=lambda entry: position[entry[0]]):
            grown = complete.add(stretch)
            if grown.size >= enough:
                complete.remove(grown)
                sent.append((write, grown))
                enough = self.piece // itemsize
        rest = complete.sorted()
        # Many small remainders would cost more than streaming gains.
        if not sent or len(rest) > len(sent) + 2:
            return False
        if not rest:
            rest = [sent.pop()[1]]  # the start sends something in any case
        if not sent:
            return False
        for write, stretch in sent:
            info(write).sends = (*info(write).sends, (start, stretch))
        info(start).rest = tuple(rest)
        return True


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
