"""Which log messages are shown: the words of COMMFUSE_LOGS. Every message goes to a logger `commfuse_fx.<area>`."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

from commfuse_fx.errors import ConfigKeyError
from commfuse_fx.support.ranks import joined_rank

VARIABLE = "COMMFUSE_LOGS"

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "trace": "each capture of the model: nodes and time",
        "retrace": "each compile after the first one of a step, with its cause",
        "passes": "one line for each pass: nodes before and after, and time",
        "plan": "each compile in one line, and how its plan was decided",
        "collectives": "a table of the final collectives",
        "sharding": "how the parameters of a divided step lie on the mesh, and what asks for it",
        "runtime": "what was found out about other ranks, such as parameters that differ at the start",
        "cuda_graphs": "each capture of a step in a CUDA graph, and what ended one",
        "failed": "if a pass or the verification of its result raises: the graph as it was before that pass",
        "changed": "the graph as captured, and after every pass that changed it",
        "graphs": "the graph as captured, and after every pass",
    }
)
"""Word -> what it shows. Each is the name of a logger under `commfuse_fx`."""

ALL, ALL_RANKS = "all", "all_ranks"

_LARGE = ("failed", "changed", "graphs")
"""Whole graphs: shown only when they are asked for by name, not where `commfuse_fx` as a whole is at DEBUG."""

_SILENT = logging.CRITICAL + 1


def logger(word: str) -> logging.Logger:
    """The logger of one of WORDS."""
    return logging.getLogger(f"commfuse_fx.{word}")


for _word in _LARGE:
    logger(_word).setLevel(logging.WARNING)


class _Terminal(logging.Handler):
    """Prints on stderr, unless the program has a handler of its own that prints the same on the terminal."""

    rank: int | None = None
    """To print with each message; None: not printed."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(_prints(handler, record) for handler in logging.getLogger().handlers):
            return
        area = record.name.split(".")[1] if "." in record.name else "log"
        rank = "" if self.rank is None else f" rank {self.rank}"
        print(f"[commfuse{rank} {area}] {record.getMessage()}", file=sys.stderr)


def _prints(handler: logging.Handler, record: logging.LogRecord) -> bool:
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stdout, sys.stderr) and record.levelno >= handler.level


_terminal = _Terminal()
_applied: tuple[str, int] = ("", 0)


def configure_logs() -> None:
    """Apply COMMFUSE_LOGS, such as "passes,retrace,-sharding", if it has changed since the last call.

    Under torchrun rank 0 prints, or all ranks with the word all_ranks. Without the variable nothing is touched.

    Raises ConfigKeyError, which lists the words, for an unknown one.
    """
    global _applied
    wanted = (os.environ.get(VARIABLE, ""), joined_rank())
    if wanted == _applied:
        return
    text, rank = wanted
    shown = parse_words(text)
    root = logging.getLogger("commfuse_fx")
    root.removeHandler(_terminal)
    everywhere = shown.pop(ALL_RANKS, False)
    for word in WORDS:
        logger(word).setLevel(logging.WARNING if word in _LARGE else logging.NOTSET)
    for word, is_shown in shown.items():
        if not is_shown:
            logger(word).setLevel(_SILENT)
        elif rank == 0 or everywhere:
            logger(word).setLevel(logging.DEBUG)
    if shown and (rank == 0 or everywhere):
        _terminal.rank = rank if everywhere else None
        root.addHandler(_terminal)
    _applied = wanted


def parse_words(text: str) -> dict[str, bool]:
    """Word -> whether it is shown ("passes") or silenced ("-passes"); of several mentions the last one counts.

    Raises ConfigKeyError for an unknown word.
    """
    found: dict[str, bool] = {}
    for part in text.split(","):
        given = part.strip()
        word = given.removeprefix("-")
        if word == ALL:
            found.update(dict.fromkeys((each for each in WORDS if each not in ("changed", "graphs")), given == word))
        elif word in WORDS or word == ALL_RANKS:
            found[word] = given == word
        elif given:
            near = difflib.get_close_matches(word, [*WORDS, ALL, ALL_RANKS], 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigKeyError(
                f"{VARIABLE}={text!r}: {word!r} is unknown{hint}; use {', '.join(WORDS)}, {ALL} or {ALL_RANKS}, "
                "separated by commas, with a - in front to silence one"
            )
    return found
