"""Locks of folders, which end with their process, however that ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path


class FolderLock:
    """A lock on a folder until `release`, or until nobody holds this object.

    is_mine: whether nobody else has it. Where the file system has no locks, as many as want one get it. Raises OSError
    for a folder that cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.release = weakref.finalize(self, _release, handle)
        self.is_mine = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_mine = False
        except OSError:  # no locks here
            pass


def _release(handle: int) -> None:
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # children of this process have the same handle
    os.close(handle)
