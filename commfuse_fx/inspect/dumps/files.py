"""Finds the files of a dump. Names in index.json are those of files beside it; nothing else is opened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.json_fields import DUMP
from commfuse_fx.support.read_file import read_file, unreadable
from commfuse_fx.support.strict_json import parse_object

INDEX = "index.json"
INDEX_SCHEMA = 1

_RANK = re.compile(r"rank(\d{1,9})")


def is_folder(path: Path, argument: str, give: str) -> bool:
    """Whether the path is one of a folder. Raises ConfigValueError where that cannot be found out."""
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise unreadable(path, argument, error, give) from None


def folder_of_rank(folder: Path, argument: str, give: str) -> Path:
    """The folder of one rank: this one, or that of the first rank in it. Raises ConfigValueError."""
    try:
        if (folder / INDEX).exists():
            return folder
        ranks = _folders_of_ranks(folder)
        inside = [] if ranks else [each.name for each in sorted(folder.iterdir()) if _folders_of_ranks(each)]
    except OSError as error:
        raise unreadable(folder, argument, error, give) from None
    if inside:
        shown = ", ".join([*inside[:4], *(["..."] if len(inside) > 4 else [])])
        raise ConfigValueError(f"{str(folder)!r} holds a dump per folder; give one of them: {shown}")
    if not ranks:
        raise ConfigValueError(f"{str(folder)!r} has neither index.json nor rank<r>/; {give}")
    return ranks[min(ranks)]


def _folders_of_ranks(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = sorted(folder.iterdir())
    return {int(match[1]): each for each in found if (match := _RANK.fullmatch(each.name)) is not None}


def read_index(folder: Path, argument: str, give: str) -> dict[str, Any]:
    """The index of a rank's folder. Raises ConfigValueError."""
    place = folder / INDEX
    return parse_object(read_file(place, argument, give), str(place), INDEX_SCHEMA, DUMP)


def file_of_dump(folder: Path, index: dict[str, Any], role: str) -> Path:
    """The file that an index names under this role, such as "json". Raises ConfigValueError unless it is beside it."""
    name = index.get(role)
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        raise ConfigValueError(f'{folder / INDEX}: "{role}" is not the name of a file beside it; write the dump again')
    return folder / name
