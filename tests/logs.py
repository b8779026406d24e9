"""What a block logs, also on ranks, where pytest's own fixture is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The messages of this level or above that commfuse_fx logs inside the block."""
    handler = _Messages()
    logger = logging.getLogger("commfuse_fx")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
