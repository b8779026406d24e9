"""How the kernel schedules Gloo's socket threads where they share a core with the step.

A Gloo device has one thread that reads sockets. It takes the lock of a connection if that is free, and otherwise looks
again at once, for as long as data is there. On a rank's only core that thread, woken by data, takes the place of one
that holds the lock, and then spins until the kernel lets the other go on: up to a tick (4 ms at 250 Hz), several times
per collective. In the class SCHED_BATCH a thread that wakes up takes nobody's place.
"""

from __future__ import annotations

import os
from pathlib import Path

SOCKET_THREAD = "gloo_tcp_loop"
"""What Gloo calls these threads."""

_TASKS = Path("/proc/self/task")


def share_a_core() -> bool:
    """Whether this process may run on one core only, so that its threads take turns."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1


def let_lock_holders_run() -> None:
    """Put the socket threads that this process has now into SCHED_BATCH, where it may run on one core only.

    With more cores there is room for them beside the step. Does nothing where the system has no such classes, or
    refuses. May be called again, when groups have been made.
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
    """The kernel's numbers of Gloo's socket threads in this process, in rising order; none without /proc."""
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
    """Let another thread run that waits for this core, if there is one."""
    os.sched_yield()
