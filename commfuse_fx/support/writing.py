"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8: an interrupt leaves no half of a file, and an old one stays until the new one is there.

    Raises OSError where the folder does not take it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def problem_with(path: Path, option: str) -> str:
    """Why the file given with `option` cannot be written; "" when it can."""
    folder = path.parent
    if path.is_dir():
        return f"{option} {path} is a folder: give the name of a file in it"
    if not folder.is_dir():
        return f"{option} {path}: there is no folder {folder}; make it first"
    if not os.access(folder, os.W_OK):
        return f"{option} {path}: the folder {folder} cannot be written; give another one"
    return ""
