"""What is said of ops that are not divided: those without a rule, and those that do not run on parts.

Why: docs/decisions.md, "Our own rules, not those of DTensor".
"""

from __future__ import annotations

import logging
from typing import Any

from torch import fx

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program

log = logging.getLogger("commfuse_fx.sharding")


class OpsWithoutRule:
    """Warns of ops without a rule, once for each op and module. group: the axes of the division."""

    def __init__(self, program: Program, group: str) -> None:
        self._program = program
        self._group = group
        self._warned: dict[tuple[Any, str], None] = {}

    def warn(self, node: fx.Node) -> None:
        key = (node.target, info(node).module)
        if key in self._warned:
            return
        self._warned[key] = None
        text = (
            f"{node.target} has no sharding rule: its inputs are gathered over {self._group}, and every rank "
            "computes the whole (cf.register_rule adds one)"
        )
        where = _where(node)
        self._program.note("replicated", where, text)
        log.warning("%s: %s", where, text)


def cannot_divide(node: fx.Node, group: str, error: Exception) -> CaptureError:
    """An error with module and source line, for an error of torch that has neither."""
    first = next(iter(str(error).splitlines()), "")
    return CaptureError(
        f"cannot divide {_where(node)} over {group}: {node.target} does not run on the ranks' parts. "
        'Compute it another way, or use parallel_mode="data_parallel". '
        f"[{type(error).__name__}: {first}]"
    )


def _where(node: fx.Node) -> str:
    """Module and source line."""
    details = info(node)
    return f"{details.module or 'the step'}{f' at {details.source}' if details.source else ''}"
