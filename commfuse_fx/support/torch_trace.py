"""Artifacts for torch's structured trace (TORCH_TRACE), which tlparse shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_tracing() -> bool:
    """Whether this torch writes a structured trace. The interface is private to torch: without it, nothing is."""
    try:
        from torch._logging._internal import trace_log
    except ImportError:
        return False
    # Torch's own handler is always there, and without a folder it does nothing. Other handlers (those of pytest, say)
    # watch everything, which is no reason to make texts.
    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def write_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text of this name to the trace."""
    try:
        from torch._logging._internal import trace_structured
    except ImportError:
        return

    def metadata() -> dict[str, Any]:
        return {"name": name, "encoding": "string"}

    trace_structured("artifact", metadata_fn=metadata, payload_fn=text, expect_trace_id=False)
