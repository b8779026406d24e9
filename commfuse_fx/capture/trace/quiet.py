"""Hold back torch's own log lines while a model is traced. The error that a trace raises has the same information."""

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
    """Holds back warnings and errors of threads that trace. TORCH_LOGS turns on lower levels, which pass."""

    depth = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.depth or record.levelno < logging.WARNING


_quiet = _Quiet()


@contextmanager
def torch_is_quiet(is_wanted: bool = True) -> Iterator[None]:
    """Inside the `with` block torch's tracing logs no warnings or errors from this thread, if `is_wanted`."""
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
