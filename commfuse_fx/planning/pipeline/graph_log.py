"""Logs whole graphs while passes run."""

from __future__ import annotations

import logging

from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.planning.pipeline.pipeline import PassRecord, Watcher
from commfuse_fx.support.logs import logger

GRAPHS, CHANGED, FAILED = logger("graphs"), logger("changed"), logger("failed")


class GraphLog:
    """Logs the graph after passes, or as it was before a pass that failed, as the levels of the loggers say."""

    def __init__(self) -> None:
        self._before = ""

    def before(self, name: str, program: Program) -> None:
        if FAILED.isEnabledFor(logging.DEBUG):
            self._before = canonical_text(program)

    def after(self, record: PassRecord, program: Program) -> None:
        if GRAPHS.isEnabledFor(logging.DEBUG):
            _log(GRAPHS, record, program)
        elif CHANGED.isEnabledFor(logging.DEBUG) and record.modified:
            _log(CHANGED, record, program)

    def failed(self, name: str, error: Exception) -> None:
        FAILED.debug(
            "pass %s raised %s; the graph before it:\n%s", name, type(error).__name__, self._before.rstrip("\n")
        )


def graph_log() -> Watcher | None:
    """None where no graphs are logged."""
    return GraphLog() if any(each.isEnabledFor(logging.DEBUG) for each in (GRAPHS, CHANGED, FAILED)) else None


def _log(where: logging.Logger, record: PassRecord, program: Program) -> None:
    verb = "modified" if record.modified else "unchanged"
    text = canonical_text(program).rstrip("\n")
    where.debug("graph after %s (%s, %d nodes)\n%s", record.name, verb, record.nodes_after, text)
