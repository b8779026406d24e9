"""Gloo's socket threads get the scheduling class SCHED_BATCH if a rank has only one CPU core.

A Gloo device has one thread that reads sockets. If the lock of a connection is taken, the thread retries at once for as
long as data is there. On a rank's only core it can preempt the thread that holds the lock. It then spins until the
kernel switches back: up to one tick (4 ms at 250 Hz), several times per collective. A thread of class SCHED_BATCH does
not preempt others when it wakes up.

Why: docs/decisions.md, "A rank with one core shares it with Gloo's threads".
"""

from __future__ import annotations

import os
from pathlib import Path

SOCKET_THREAD = "gloo_tcp_loop"
"""The name of these threads in Gloo."""

_TASKS = Path("/proc/self/task")


def share_a_core() -> bool:
    """Whether this process may run on one core only, so that its threads take turns."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1


def let_lock_holders_run() -> None:
    """Give this process's present socket threads the class SCHED_BATCH if it may run on one core only.

    It does nothing if the system has no such class or refuses. It may be called again after groups have been made.
    """
    if not hasattr(os, "sched_setscheduler") or not share_a_core():
        return
    for thread in socket_threads():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except ProcessLookupError:
            continue  # has ended
        except OSError:
            return  # a sandbox forbids it: slower, and otherwise the same


def socket_threads() -> list[int]:
    """The thread ids of Gloo's socket threads in this process, in rising order; empty on systems without /proc."""
    found = []
    for number in sorted(int(task.name) for task in _TASKS.iterdir()) if _TASKS.is_dir() else ():
        try:
            name = (_TASKS / str(number) / "comm").read_text().strip()
        except OSError:
            continue  # has ended
        if name == SOCKET_THREAD:
            found.append(number)
    return found


def give_way() -> None:
    """Let another thread that waits for this core run, if there is one."""
    os.sched_yield()
