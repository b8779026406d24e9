"""A compiled step as a folder of files, one folder for each rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.dumps.files import INDEX, INDEX_SCHEMA
from commfuse_fx.inspect.explain.compiled_graph import CompiledGraph
from commfuse_fx.inspect.explain.dot import to_dot
from commfuse_fx.inspect.report.page import report
from commfuse_fx.planning.pipeline.pipeline_json import captured_json
from commfuse_fx.support.json_fields import DUMP
from commfuse_fx.support.strict_json import parse_json
from commfuse_fx.support.writing import write_whole

PURPOSES = {
    "graph.txt": "the final graph as canonical text",
    "graph.json": "the final graph as data",
    "captured.json": "the graph before all passes, as data",
    "explain.txt": "why the graph is as it is, and what is predicted for it",
    "graph.dot": "the final graph for Graphviz",
    "report.html": "all of it as one page for a browser",
}
"""The files of a rank's folder beside index.json and stages/, and what each is for."""

_ROLES = {
    "text": "graph.txt",
    "json": "graph.json",
    "captured": "captured.json",
    "explain": "explain.txt",
    "dot": "graph.dot",
    "report": "report.html",
}
_STAGE = re.compile(r"stages/\d{2,4}-[A-Za-z0-9_-]{1,100}\.txt", re.ASCII)


def dump(graph: CompiledGraph, directory: str | Path) -> Path:
    """Write `rank<r>/` under `directory` and return that folder. index.json comes last: a folder without it is no dump.

    Files of an earlier dump are replaced, or removed where this one has no such file; other files stay.

    Raises ConfigValueError, which names the folder, where it cannot be written.
    """
    folder = Path(directory) / f"rank{graph.rank}"
    contents = _contents(graph)
    index = _index(graph, contents)
    try:
        (folder / "stages").mkdir(parents=True, exist_ok=True)
        _remove_earlier(folder, keep=contents)
        for name, text in contents.items():
            write_whole(folder / name, text)
        write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigValueError(
            f"the dump cannot be written to {str(folder)!r}: {reason}; give a folder that you may write to"
        ) from error
    return folder


def _contents(graph: CompiledGraph) -> dict[str, str]:
    """Name -> text of all files but the index. Made before anything is written."""
    found = {_stage_file(number, name): stage.text() for number, (name, stage) in enumerate(graph.stages.items())}
    found["graph.txt"] = graph.text()
    found["graph.json"] = graph.to_json()
    captured = graph.captured
    if captured is not None:
        found["captured.json"] = captured_json(captured, graph.pipeline)
    found["explain.txt"] = graph.explain().text()
    found["graph.dot"] = to_dot(graph.program)
    found["report.html"] = report(graph)
    return found


def _stage_file(number: int, name: str) -> str:
    """Names of a saved step come from a file and may be anything."""
    return f"stages/{number:02d}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:100]}.txt"


def _index(graph: CompiledGraph, contents: dict[str, str]) -> dict[str, Any]:
    stages = [
        {"pass": name, "modified": stage.modified, "file": _stage_file(number, name)}
        for number, (name, stage) in enumerate(graph.stages.items())
    ]
    return {
        "schema": INDEX_SCHEMA,
        "rank": graph.rank,
        "fingerprint": graph.fingerprint,
        **{role: name for role, name in _ROLES.items() if name in contents},
        "files": {name: purpose for name, purpose in PURPOSES.items() if name in contents},
        "stages": stages,
    }


def _remove_earlier(folder: Path, keep: dict[str, str]) -> None:
    """Remove the index, and what it says that an earlier dump has written and this one will not replace."""
    place = folder / INDEX
    try:
        earlier = parse_json(place.read_text(encoding="utf-8"), INDEX, DUMP)
    except (FileNotFoundError, ValueError):
        earlier = None  # no dump, or a damaged one: nothing is known to be its
    for name in _written_by(earlier):
        if name not in keep:
            (folder / name).unlink(missing_ok=True)
    place.unlink(missing_ok=True)


def _written_by(index: Any) -> list[str]:
    """The files that an index names, as far as a dump writes files of such names: an index is data from anywhere."""
    if not isinstance(index, dict):
        return []
    files, stages = index.get("files"), index.get("stages")
    named = [*(files if isinstance(files, dict) else ())]
    for stage in stages if isinstance(stages, list) else ():
        named.append(stage.get("file") if isinstance(stage, dict) else None)
    return [name for name in named if isinstance(name, str) and (name in PURPOSES or _STAGE.fullmatch(name))]
