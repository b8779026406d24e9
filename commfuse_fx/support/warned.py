"""Warnings of this project: each is given once per compiled step, and says of which rank it is.

Every rank gives them: a rank that runs another model than rank 0 may be what a warning is about.
"""

from __future__ import annotations

import logging

from commfuse_fx.support.ranks import joined_rank, joined_size

_given: dict[str, None] = {}


class _OnceWithRank(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        if text in _given:
            return False
        _given[text] = None
        if joined_size() > 1:
            record.msg, record.args = f"[rank {joined_rank()}] {text}", ()
        return True


_once = _OnceWithRank()


def warn_once_per_step() -> None:
    """From now on, until the next compiled step is made: a warning whose text has been given is left out.

    A trace for another batch size warns of what the first one has warned of, and so does every evaluation.
    """
    forget_given_warnings()
    for name in sorted(logging.Logger.manager.loggerDict):
        if name.startswith("commfuse_fx."):
            logging.getLogger(name).addFilter(_once)


def forget_given_warnings() -> None:
    """From now on they are given again."""
    _given.clear()
