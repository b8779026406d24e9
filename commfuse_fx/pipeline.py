"""Run passes over a program in order. Generic: it knows no pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.program import Program


class Pass(Protocol):
    """A graph-to-graph transformation: a frozen dataclass whose fields are its options.

    `requires` and `ensures` name facts about the program ("lowered", "reduced", ...): the pipeline
    refuses an order in which a required fact was not established before.
    """

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> tuple[str, ...]: ...

    @property
    def ensures(self) -> tuple[str, ...]: ...

    def __call__(self, program: Program) -> bool:
        """Transform the program in place. Returns whether anything changed."""
        ...


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. `seconds` is its own time, without verification and observers."""

    name: str
    modified: bool
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class PassPipeline:
    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        known: dict[str, None] = {}
        for item in self.passes:
            missing = [fact for fact in item.requires if fact not in known]
            if missing:
                raise VerificationError(f"pass {item.name} requires {', '.join(missing)}, which no pass before ensures")
            known.update(dict.fromkeys(item.ensures))

    def run(
        self,
        program: Program,
        check: Callable[[Program, str], None] | None = None,
        observers: Sequence[Callable[[str, Program], None]] = (),
        part: slice = slice(None),
    ) -> list[PassRecord]:
        """Apply all passes, or a part of them. `check(program, pass name)` verifies after each; observers see each
        result."""
        records: list[PassRecord] = []
        for item in self.passes[part]:
            before = len(program.graph.nodes)
            start = time.perf_counter()
            modified = item(program)
            seconds = time.perf_counter() - start
            records.append(PassRecord(item.name, modified, seconds, before, len(program.graph.nodes)))
            if check is not None:
                check(program, item.name)
            for observe in observers:
                observe(item.name, program)
        return records
