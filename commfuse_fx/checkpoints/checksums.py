"""Sizes and checksums of files, by which damage is noticed."""

from __future__ import annotations

import zlib
from pathlib import Path

from commfuse_fx.errors import CheckpointError

_BLOCK = 1 << 24


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file. Raises OSError."""
    size = found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, found = size + len(block), zlib.crc32(block, found)
    return size, found


def check_file(path: Path, wanted: tuple[int, int]) -> None:
    """Raises CheckpointError unless a file is there and as it was. wanted: what `checksum` has given for it."""
    try:
        found = checksum(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint's file {str(path)!r} is missing: copy the whole folder, or take another checkpoint"
        ) from None
    if found != wanted:
        size = f"has {found[0]} bytes in place of {wanted[0]}"
        what = size if found[0] != wanted[0] else "has other bytes than when it was written"
        raise CheckpointError(f"{str(path)!r} {what}: copy it again, or take another checkpoint")
