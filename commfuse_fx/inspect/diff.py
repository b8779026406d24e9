"""Semantic diffs of compiled graphs."""

from __future__ import annotations

from typing import Any, NoReturn

from commfuse_fx.errors import NotAvailableError


def diff(a: Any, b: Any) -> NoReturn:
    """Compare two compiled graphs. Raises NotAvailableError: compare `lowered.text()` line by line for now."""
    raise NotAvailableError(
        "cf.diff() is not available yet: the canonical text has one line per node and stable names, so a line diff of "
        "lowered.text() shows what changed, and lowered.fingerprint whether anything did"
    )
