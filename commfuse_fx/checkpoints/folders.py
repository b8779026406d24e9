"""The folder of a checkpoint, which appears and is replaced as a whole.

A new checkpoint is written to a folder beside it, whose name begins with a dot. When it is complete, the two folders
change places in one operation of the file system. Where that is not available they are renamed one after the other;
who comes between finds the old one under its other name.

Why: docs/decisions.md, "A checkpoint takes the place of a folder, and is written beside it".
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from commfuse_fx.checkpoints.checkpoint_index import NAME
from commfuse_fx.checkpoints.folder_locks import FolderLock
from commfuse_fx.errors import CheckpointError, ConfigTypeError
from commfuse_fx.support.checks import show
from commfuse_fx.support.long_lists import shortened

_DIGITS = 12

_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2(2)


class CheckpointFolder:
    """The folder that a user has named for a checkpoint. Raises ConfigTypeError for what is no path.

    Several programs may write to one folder at a time: each writes to its own, and the last one to complete stays.
    """

    def __init__(self, path: object) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in os.fsdecode(path):
            raise ConfigTypeError(f"the folder of a checkpoint is {show(path)}; give the path of a folder")
        self.path = Path(os.path.realpath(os.fsdecode(path)))
        self._old = self._beside("old")
        self._lock: FolderLock | None = None  # says that somebody writes

    def existing(self) -> Path:
        """Where the checkpoint lies. Raises CheckpointError if there is none, and OSError."""
        for path in (self.path, self._old):
            if (path / NAME).is_file():
                return path
        if not self.path.exists():
            raise CheckpointError(f"there is no folder {str(self.path)!r}: give one that step.save() has written")
        if (self.path / ".metadata").exists():
            raise CheckpointError(
                f"{str(self.path)!r} has no {NAME}: torch.distributed.checkpoint itself has written it, and its "
                "load() reads it; step.load() reads what step.save() has written"
            )
        raise CheckpointError(
            f"{str(self.path)!r} has no {NAME}, so it is no checkpoint that step.save() has completed: give another one"
        )

    def begin(self) -> Path:
        """Make the folder to write to, and remove what writers that were killed have left.

        Raises CheckpointError if a checkpoint cannot take the place of what is there, and OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._check_free()
        for left in self.path.parent.glob(f".{_escaped(self.path.name)}.{'[0-9a-f]' * _DIGITS}.part"):
            self._remove_left(left)
        while True:
            part = self._new_part()
            part.mkdir()
            with suppress(FileNotFoundError):
                self._lock = FolderLock(part)
                if self._lock.is_mine and part.exists():
                    return part  # and no other writer has taken it for left over before it had the lock

    def complete(self, part: Path) -> None:
        """Let the folder that was written take the place of the one before.

        Raises CheckpointError if it cannot take the place of what is there by now, and OSError.
        """
        _sync(part)
        self._check_free()
        before = part
        try:
            os.rename(part, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not _exchanged(part, self.path):
                before = self._old
                os.rename(self.path, before)
                os.rename(part, self.path)
        _sync(self.path.parent)
        self.abandon(before)

    def abandon(self, part: Path) -> None:
        """Remove a folder that was written."""
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(part, ignore_errors=True)

    def _beside(self, ending: str) -> Path:
        return self.path.parent / f".{self.path.name}.{ending}"

    def _new_part(self) -> Path:
        return self._beside(f"{uuid.uuid4().hex[:_DIGITS]}.part")

    def _remove_left(self, part: Path) -> None:
        """Remove what a writer that was killed has left.

        It gets another name first. Where the file system has no locks, its writer may still be at it, and must not
        complete what is half removed.
        """
        with suppress(OSError):  # another writer removes it, too
            lock = FolderLock(part)
            if lock.is_mine:
                shutil.rmtree(part.rename(self._new_part()), ignore_errors=True)

    def _check_free(self) -> None:
        """Raises CheckpointError if a checkpoint cannot take the place of what is there."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{str(self.path)!r} is a file: give the path of a folder, or remove the file")
        found = sorted(os.listdir(self.path))
        others = [name for name in found if not _is_ours(name)] if NAME in found else found
        if os.path.ismount(self.path):
            what = "is where a file system is mounted, and a checkpoint"
        elif others:
            names = ", ".join(shortened(others, 3, "and {} more"))
            what = f"has other files than those of a checkpoint ({names}), which"
        else:
            return
        raise CheckpointError(
            f"the folder {str(self.path)!r} {what} takes its place as a whole: give a folder of its own, such as "
            f"{str(self.path / 'checkpoint')!r}"
        )

    def _recover(self) -> None:
        """A writer may have been killed between the two renamings, or behind them."""
        if not (self._old / NAME).exists():
            return
        if self.path.exists():
            shutil.rmtree(self._old, ignore_errors=True)
        else:
            os.rename(self._old, self.path)


def _is_ours(name: str) -> bool:
    """Whether a file in the folder of a checkpoint belongs to it."""
    return name in (NAME, ".metadata") or name.endswith(".distcp")


def _escaped(name: str) -> str:
    """A name as a pattern of `glob`."""
    return "".join(f"[{mark}]" if mark in "*?[" else mark for mark in name)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places. False where the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # a C library without it
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _sync(folder: Path) -> None:
    """Let the entries of a folder reach the disk, where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
