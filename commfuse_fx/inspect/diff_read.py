"""Finds the graph in what a caller gave: a Lowered, a text, a file or a dump directory. Nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.inspect.diff_json import load_json, read_json
from commfuse_fx.inspect.diff_records import GraphRecord
from commfuse_fx.inspect.diff_text import read_text
from commfuse_fx.lowered import Lowered

MOST_BYTES = 1 << 30
"""Larger files are refused: a graph of 10,000 nodes has some 10 MB."""

_RANK = re.compile(r"rank(\d{1,9})")


def read_graph(source: Any, argument: str) -> GraphRecord:
    """The graph of `source`, which is `argument` in messages.

    source: a Lowered; canonical text or JSON as a str; or the path of a file of either, of a folder that
        `Lowered.dump` wrote, or of the folder of one rank in it. Of several ranks the first is read.

    Raises ConfigTypeError for anything else, and ConfigValueError for what is missing, damaged or of a newer schema.
    """
    if isinstance(source, Lowered):
        return read_json(source.to_json(), f"{argument} (a Lowered)")
    if not isinstance(source, (str, Path)):
        raise ConfigTypeError(
            f"{argument} is of type {type(source).__name__}; give a Lowered, its text() or to_json(), or the path of "
            "such a file or of a folder that Lowered.dump wrote"
        )
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith(("{", "#"))):
        return _parse(source, argument)
    return _read_path(Path(source), argument)


def _parse(content: str, label: str) -> GraphRecord:
    return read_json(content, label) if content.lstrip().startswith(("{", "[")) else read_text(content, label)


def _read_path(path: Path, argument: str) -> GraphRecord:
    try:
        if path.is_dir():
            path = _graph_of_dump(path)
        return _parse(_content(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise ConfigValueError(f"{argument} is {str(path)!r}, which cannot be read: {reason}; {_GIVE}") from None
    except ConfigValueError:
        raise
    except ValueError as error:  # a NUL in the path
        raise ConfigValueError(f"{argument} is {str(path)!r}, which cannot be read: {error}; {_GIVE}") from None


_GIVE = "give a file of Lowered.text() or to_json(), or a folder that Lowered.dump wrote"


def _content(path: Path) -> str:
    if not path.exists():
        raise ConfigValueError(f"there is no file {str(path)!r}; {_GIVE}")
    if not path.is_file():
        raise ConfigValueError(f"{str(path)!r} is no regular file; {_GIVE}")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ConfigValueError(f"{str(path)!r} has {size} bytes, more than {MOST_BYTES}: this is no graph; {_GIVE}")
    if size == 0:
        raise ConfigValueError(f"{str(path)!r} is empty; {_GIVE}")
    return path.read_text(encoding="utf-8")


def _graph_of_dump(folder: Path) -> Path:
    """The graph.json of a dump, or of the folder of one rank."""
    if not (folder / "index.json").exists():
        ranks = {
            int(match[1]): each
            for each in sorted(folder.iterdir())
            if (match := _RANK.fullmatch(each.name)) is not None
        }
        if not ranks:
            raise ConfigValueError(f"{str(folder)!r} has neither index.json nor rank<r>/; {_GIVE}")
        folder = ranks[min(ranks)]
    place = folder / "index.json"
    index = load_json(_content(place), str(place))
    name = index.get("json")
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ConfigValueError(f'{place}: "json" is not the name of a file beside it; write the dump again')
    return folder / name
