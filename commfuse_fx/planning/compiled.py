"""What compiling gives: the final program, and how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from commfuse_fx.capture.joint import Outputs
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord
from commfuse_fx.planning.request import PassRequest


@dataclass(frozen=True)
class Collective:
    """A collective of the final graph, as this rank runs it.

    kind: such as "all_reduce", "all_gather", "reduce_scatter", "broadcast" or "all_to_all".
    reduce_op: such as "sum"; None for a kind that reduces nothing.
    dtype: of the data on the wire.
    group: the global ranks that take part.
    bytes: payload of the full, unsharded buffer, without padding.
    members: the parameters that it serves; of a collective that serves none, names of nodes.
    fusion_id: the id that the user has given; None without one.
    index: sequence number of the first member.
    phase: "forward", "backward" or "update".
    """

    kind: str
    reduce_op: str | None
    dtype: torch.dtype
    group: tuple[int, ...]
    bytes: int
    members: list[str]
    fusion_id: int | None
    index: int
    phase: str

    @property
    def fused(self) -> bool:
        """Whether it has more than one member."""
        return len(self.members) > 1

    @classmethod
    def of(cls, details: CollectiveInfo, node: NodeInfo, ranks: tuple[int, ...]) -> Collective:
        """The collective of a start node, for these ranks."""
        return cls(
            kind=details.kind,
            reduce_op=details.reduce_op,
            dtype=details.dtype,
            group=ranks,
            bytes=details.nbytes,
            members=list(details.members),
            fusion_id=details.fusion_id,
            index=details.sequence,
            phase=node.phase,
        )


@dataclass(frozen=True)
class Snapshot:
    """A snapshot is the program after one pass, as text.

    name: of the pass; "capture" is the graph before all passes.
    modified: whether the pass has changed anything.
    collectives: those of the program, in issue order. Their groups name mesh axes.
    """

    name: str
    modified: bool
    _text: str
    collectives: tuple[CollectiveInfo, ...]

    def text(self) -> str:
        """The canonical text of the program after the pass."""
        return self._text


@dataclass
class Compiled:
    """The final program, the program as captured (to replay the passes from), and what it cost.

    voted: of a step that several ranks run, the text of what was captured, without and with what depends on the batch.
    outputs: of a module, what it returns; of a step with auxiliary outputs, those. asked: what passes were asked for.
    """

    program: Program
    captured: Program | None
    pipeline: PassPipeline
    records: list[PassRecord]
    capture_seconds: float
    voted: tuple[str, str] | None = None
    outputs: Outputs | None = None
    asked: PassRequest = field(default_factory=PassRequest)

    def replay(self) -> Mapping[str, Snapshot]:
        """Run the passes again and keep a text after each."""
        assert self.captured is not None
        program = self.captured.copy()
        texts: dict[str, str] = {}
        collectives: dict[str, tuple[CollectiveInfo, ...]] = {}

        def keep(name: str, program: Program) -> None:
            texts[name] = canonical_text(program)
            collectives[name] = tuple(map(collective_of, program.collectives()))

        keep("capture", program)
        modified = {record.name: record.modified for record in self.pipeline.run(program, observers=(keep,))}
        return {name: Snapshot(name, modified.get(name, True), texts[name], collectives[name]) for name in texts}
