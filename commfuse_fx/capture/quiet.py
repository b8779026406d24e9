"""Torch's own log lines while a model is traced: what they tell stands in the error that the trace raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch._subclasses.functional_tensor",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.recording",
    "torch.fx.experimental.symbolic_shapes",
)


class _Quiet(logging.Filter, threading.local):
    """Holds back warnings and errors of the threads that trace; what somebody asked for with TORCH_LOGS is below."""

    depth = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.depth or record.levelno < logging.WARNING


_quiet = _Quiet()


@contextmanager
def torch_is_quiet(is_wanted: bool = True) -> Iterator[None]:
    """Inside the `with` block torch's tracing logs no warnings and errors from this thread."""
    if not is_wanted:
        yield
        return
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_quiet)  # once: a filter that is there already is not added again
    _quiet.depth += 1
    try:
        yield
    finally:
        _quiet.depth -= 1
