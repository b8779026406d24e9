"""Finds the graph in what a caller gave: a Lowered, a text, a file or a dump directory. Nothing is executed.

Why: docs/decisions.md, "Text, not objects, is what is compared".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.inspect.diff.read_text import read_text
from commfuse_fx.inspect.diff.records import GraphRecord
from commfuse_fx.inspect.dumps.files import file_of_dump, folder_of_rank, is_folder, read_index
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.inspect.lowered_graphs import refuse_several
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.support.read_file import read_file

_GIVE = "give a file of Lowered.text() or to_json(), or a folder that Lowered.dump wrote"


def read_graph(source: Any, argument: str) -> GraphRecord:
    """The graph of `source`, which is `argument` in messages.

    source: a Lowered; canonical text or JSON as a str; or the path of a file of either, of a folder that
        `Lowered.dump` wrote, or of the folder of one rank in it. Of several ranks the first is read.

    Raises ConfigTypeError for anything else, and ConfigValueError for what is missing, damaged or of a newer schema.
    """
    if isinstance(source, Lowered):
        return read_text(source.text(), f"{argument} (a Lowered)")
    refuse_several(source, argument)
    if not isinstance(source, (str, Path)):
        raise ConfigTypeError(
            f"{argument} is of type {type(source).__name__}; give a Lowered, its text() or to_json(), or the path of "
            "such a file or of a folder that Lowered.dump wrote"
        )
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith(("{", "#"))):
        return _parse(source, argument)
    return _read_path(Path(source), argument)


def _parse(content: str, label: str) -> GraphRecord:
    if content.lstrip().startswith(("{", "[")):
        try:
            content = canonical_text(from_json(content, label, any_op=True))
        except ConfigValueError as error:
            raise ConfigValueError(f"{error}, or give the text of the graph, such as the graph.txt of a dump") from None
    return read_text(content, label)


def _read_path(path: Path, argument: str) -> GraphRecord:
    if is_folder(path, argument, _GIVE):
        folder = folder_of_rank(path, argument, _GIVE)
        path = file_of_dump(folder, read_index(folder, argument, _GIVE), "text")
    return _parse(read_file(path, argument, _GIVE), str(path))
