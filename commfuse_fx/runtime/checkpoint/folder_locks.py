"""Locks of folders, which end with their process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path
from types import TracebackType


class FolderLock:
    """A lock on a folder, for a `with` block or until `release`. Other programs and objects do not get it meanwhile.

    waits: until it is free. is_taken: whether somebody else has it, which only one that does not wait finds. Where the
    file system has no locks, as many as want one get it. Raises OSError for a folder that cannot be opened.
    """

    def __init__(self, folder: Path, *, waits: bool) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.release = weakref.finalize(self, _release, handle)
        self.is_taken = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            self.is_taken = error.errno in (errno.EAGAIN, errno.EACCES)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _release(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)  # children of this process have the same handle
    except OSError:
        pass
    finally:
        os.close(handle)
