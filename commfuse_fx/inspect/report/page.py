"""The HTML report of a compiled step: one file that needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from commfuse_fx.inspect.explain.compiled_graph import CompiledGraph
from commfuse_fx.inspect.report.data import report_data
from commfuse_fx.machine.timeline import Timeline

SCRIPTS = (
    "base.js",
    "head.js",
    "layouts.js",
    "timeline.js",
    "timeline_draw.js",
    "timeline_input.js",
    "collectives.js",
    "fusion.js",
    "tree.js",
    "search.js",
    "report.js",
)
"""In the order in which they stand in the page."""

_SLOT = re.compile(r"@(style|data|script)@")

_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def report(graph: CompiledGraph, cluster: Any = None, measured: Timeline | None = None) -> str:
    """One self-contained HTML page about a compiled step: it fetches nothing, and it is the same at every run.

    cluster: what the times are predicted for, as for `Lowered.simulate`. measured: what
    `CompiledStep.record_communication` has recorded; its steps are shown below the predicted one.
    Raises what `Lowered.simulate` raises for a bad cluster.
    """
    return page(asdict(report_data(graph, cluster, measured)))


def page(data: dict[str, Any]) -> str:
    """The page for the fields of a ReportData."""
    slots = {"style": _file("report.css"), "data": embedded(data), "script": "\n".join(map(_file, SCRIPTS))}
    return _SLOT.sub(lambda slot: slots[slot[1]], _file("report.html"))


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    return json.dumps(data, separators=(",", ":")).translate(_ESCAPES)


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
