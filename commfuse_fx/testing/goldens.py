"""Golden files: what they are called, what they hold, and how one differs from a graph."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commfuse_fx.errors import CommFuseError
from commfuse_fx.inspect.diff.diff_graphs import diff
from commfuse_fx.support.long_lists import shortened

FOLDER = "__graphs__"
"""Folder of the goldens, next to the test file."""

# Not .txt: pytest collects test*.txt as doctests.
_SUFFIX = ".graph"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=-]")
_LONGEST = 120
_GRAPH_LINES = 100
_DIFF_LINES = 40
_DIFF_WIDTH = 200
_REST = "... and {} more lines"
_TORCH = "# torch: "


@dataclass(frozen=True)
class Comparison:
    """A golden held against a graph.

    golden_torch, torch: versions in the two headers; None where a text has none. differs: whether anything beyond that
    line does. report: the semantic diff, then lines; "" where nothing differs.
    """

    golden_torch: str | None
    torch: str | None
    differs: bool
    report: str

    @property
    def is_other_torch(self) -> bool:
        return self.golden_torch is not None and self.golden_torch != self.torch


def golden_path(test_file: Path, names: Sequence[str], name: str | None) -> Path:
    """The golden of a check: `__graphs__/test_graph.TestMlp.test_step-dp2@name.graph` next to the test's file.

    names: of the classes and the function, the last with its parameters in brackets. What a file name should not hold
    becomes `_`, and a digest is added then, so that no two tests have one golden.
    """
    function, bracket, parameters = names[-1].partition("[")
    wanted = ".".join((test_file.stem, *names[:-1], function))
    if bracket:
        wanted += f"-{parameters.removesuffix(']')}"
    readable = _UNSAFE.sub("_", wanted)
    if readable != wanted or len(readable) > _LONGEST:
        digest = hashlib.sha256(wanted.encode()).hexdigest()[:8]
        readable = f"{readable[:_LONGEST]}-{digest}"
    if name is not None:
        readable += f"@{name}"
    return test_file.parent / FOLDER / f"{readable}{_SUFFIX}"


def read_golden(path: Path) -> str | None:
    """The text of a golden; None where there is none. Raises OSError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def write_golden(path: Path, text: str) -> None:
    """Write a golden whole or not at all. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    # By process: those of a parallel run never write to one file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def compare(golden: str, text: str) -> Comparison:
    """Hold a golden against the canonical text of a graph. The version of torch is compared by itself."""
    old, new = _torch_of(golden), _torch_of(text)
    if old is not None and new is not None:
        golden = golden.replace(f"{_TORCH}{old}\n", f"{_TORCH}{new}\n", 1)
    differs = golden != text
    return Comparison(old, new, differs, _report(golden, text) if differs else "")


def _torch_of(text: str) -> str | None:
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith(_TORCH):
            return line.removeprefix(_TORCH)
    return None


def _report(golden: str, text: str) -> str:
    return f"{_semantic(golden, text)}\n\n{_lines(golden, text)}"


def _semantic(golden: str, text: str) -> str:
    try:
        found = replace(diff(golden, text), before="golden", after="this graph")
        return "\n".join(shortened(found.text().splitlines(), _GRAPH_LINES, _REST))
    except CommFuseError as error:
        # A golden that somebody edited need not be a graph.
        return f"no comparison of graphs, only of lines: {error}"


def _lines(golden: str, text: str) -> str:
    changes = difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "this graph", n=1, lineterm="")
    lines = [line if len(line) <= _DIFF_WIDTH else f"{line[: _DIFF_WIDTH - 3]}..." for line in changes]
    return "\n".join(shortened(lines, _DIFF_LINES, _REST))
