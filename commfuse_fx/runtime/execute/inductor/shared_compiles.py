"""Ranks of one host share what they compile: each region is compiled by one of them, the others read its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

Code = TypeVar("Code")

LONGEST_WAIT = 600.0
"""Seconds to wait for another process that compiles the same. Then this one compiles it as well."""


def compile_each(tasks: Mapping[str, Callable[[], Code]], rank: int, folder: Path) -> dict[str, Code]:
    """Run every task, by its text, while no other process on this host runs one of the same text.

    Ranks begin at other tasks, and leave those for later that others run. A task keeps its result on disk, where it
    finds it when another process has run it. Which process runs what decides nothing but who waits.

    folder: where the locks are, the same for all processes of the host.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    start = rank % len(tasks) if tasks else 0
    left = [*tasks][start:] + [*tasks][:start]
    found: dict[str, Code] = {}
    while left:
        for text in left:
            if (lock := _acquired(folder, text, wait=0.0)) is not None:
                with lock:
                    found[text] = tasks[text]()
        left = [text for text in left if text not in found]
        if left:  # nothing else to do: wait for the first of them
            with _acquired(folder, left[0], LONGEST_WAIT) or nullcontext():
                found[left[0]] = tasks[left[0]]()
            left = left[1:]
    return found


def _acquired(folder: Path, text: str, wait: float) -> AbstractContextManager[Any] | None:
    """The lock of a task, once this process holds it; None if another one has had it all the time."""
    lock = FileLock(folder / f"{sha256(text.encode()).hexdigest()}.lock")
    try:
        return lock.acquire(timeout=wait)
    except Timeout:
        return None
    except OSError:  # a folder that cannot be written to: there is nothing to share
        return nullcontext()
