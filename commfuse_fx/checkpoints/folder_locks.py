"""Locks of folders, which end with their process, however that ends.

Why: docs/decisions.md, "A checkpoint takes the place of a folder, and is written beside it".
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FolderLock:
    """A lock on a folder until `release`, or until nobody holds this object.

    A child of this process has it as well, until it ends.

    is_mine: whether nobody else has it. Where the file system has no locks, as many as want one get it. Raises OSError
    for a folder that cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.release = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_mine = True
        except BlockingIOError:
            self.is_mine = False
        except OSError:
            self.is_mine = True  # no locks here
