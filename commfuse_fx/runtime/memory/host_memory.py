"""Freed CPU memory stays with the process, so that the next step need not get it from the system again.

glibc gives large freed blocks back to the system, which then zeroes every page that it hands out again. That can take
a tenth of a training step on a CPU. Every step needs the same memory, so the process keeps it, as CUDA's caching
allocator does. The peak memory of the process stays about the same, but it does not shrink between steps.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NEVER = -1

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables of mallopt(3). If the user has set one of them, nothing is changed here."""


@cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees from now on.

    It does nothing if the process does not use glibc's malloc, or if the environment has settings for it.
    """
    if not _uses_glibc() or any(name in os.environ for name in SETTINGS):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # The heap's end is not given back, and no block is a mapping of its own.
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_MAX, 0)


def give_freed_memory_back() -> None:
    """Let the system have what this process has freed, and will not need in its next steps."""
    if _uses_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _uses_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc" and "LD_PRELOAD" not in os.environ
