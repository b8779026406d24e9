"""Code on disk that nobody has finished, as the process that wrote it was killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock


def remove_half_written(folder: Path) -> list[Path]:
    """Delete libraries in the folder of Inductor's code that no linker has finished. Returns what was deleted.

    Inductor takes any file that has the right name, and would fail at such a one in every run. Linkers write the first
    bytes of a library last. What another process is writing now stays: that process holds Inductor's lock of it.
    """
    removed = []
    for path in sorted(folder.glob("*/*.so")):
        with suppress(OSError):  # another process was faster, or holds the lock
            if _is_unfinished(path):
                key, _, _ = path.name.partition(".")
                with FileLock(folder / "locks" / f"{key}.lock").acquire(timeout=0):
                    if _is_unfinished(path):
                        path.unlink()
                        removed.append(path)
    return removed


def _is_unfinished(path: Path) -> bool:
    with path.open("rb") as file:
        return not any(file.read(4))
