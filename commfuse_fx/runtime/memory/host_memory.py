"""Memory that one step frees stays with the process for the next one.

glibc gives large blocks back to the system when they are freed, and the system hands them out again page by page, with
zeros: on a CPU that is up to a tenth of a training step, or nothing, by how the blocks happen to lie. Every step
needs the same memory again, so it is kept, as CUDA's caching allocator does. The process peaks about where it
would, and stays there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NEVER = -1

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables of mallopt(3): whoever sets one of them has decided."""


@cache
def keep_freed_memory() -> None:
    """Keep it from now on, in the whole process; not where glibc's malloc is not in use, or where the environment has
    settings of it."""
    if platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ or any(name in os.environ for name in SETTINGS):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # The heap's end is not given back, and no block is a mapping of its own.
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_MAX, 0)
