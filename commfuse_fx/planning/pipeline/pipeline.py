"""Run passes over a program in order. Generic: it knows no pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, Pass, PassContext, PricedPass, Variant


@dataclass(frozen=True)
class PassRecord:
    """A record says what one pass did.

    name: of the pass.
    modified: whether it has changed anything.
    seconds: its own time, without verification and observers.
    nodes_before, nodes_after: how many nodes the graph had.
    """

    name: str
    modified: bool
    seconds: float
    nodes_before: int
    nodes_after: int


class Watcher(Protocol):
    """Looks on while passes run. It changes nothing."""

    def before(self, name: str, program: Program) -> None:
        """The pass of this name is about to run."""
        ...

    def after(self, record: PassRecord, program: Program) -> None:
        """A pass has run, and its result was verified if results are."""
        ...

    def failed(self, name: str, error: Exception) -> None:
        """The pass of this name, or the verification of its result, has raised."""
        ...


@dataclass(frozen=True)
class PassPipeline:
    """A pipeline runs passes over a program in order. It knows no single pass.

    passes: the passes, each an instance with its options.
    given: facts that hold before the first one.
    variant: the way to plan that it stands for, where several are compared.

    Raises VerificationError where a pass requires a fact that no pass before it ensures.
    """

    passes: tuple[Pass, ...]
    given: tuple[str, ...] = ()
    context: PassContext = NO_PRICES
    variant: Variant = field(default=Variant(), compare=False)

    def __post_init__(self) -> None:
        known = dict.fromkeys(self.given)
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
        watcher: Watcher | None = None,
    ) -> list[PassRecord]:
        """Apply all passes, or a part of them, and return what each did.

        check: called with the program and the name of each pass that says it has changed something, and of the last;
            it raises where the result is wrong.
        observers: called with the name of the pass and the program after each.
        part: the passes to run.
        watcher: told before and after each pass, and when one fails.
        """
        records: list[PassRecord] = []
        for item in self.passes[part]:
            if watcher is not None:
                watcher.before(item.name, program)
            try:
                record = self._apply(item, program)
                if check is not None and (record.modified or item is self.passes[-1]):
                    check(program, item.name)
            except Exception as error:
                if watcher is not None:
                    watcher.failed(item.name, error)
                raise
            records.append(record)
            for observe in observers:
                observe(item.name, program)
            if watcher is not None:
                watcher.after(record, program)
        return records

    def _apply(self, item: Pass, program: Program) -> PassRecord:
        before = len(program.graph.nodes)
        start = time.perf_counter()
        modified = item(program, self.context) if isinstance(item, PricedPass) else item(program)
        seconds = time.perf_counter() - start
        return PassRecord(item.name, modified, seconds, before, len(program.graph.nodes))
