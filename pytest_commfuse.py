"""The pytest plugin of commfuse-fx: fixture `graph_snapshot` and option `--graph-update`.

A module of its own beside the package: pytest imports its plugins whenever it starts, and importing the package imports
torch, which takes seconds. The package is imported when a test asks for the fixture.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from commfuse_fx.testing.snapshot import GraphSnapshot

_OTHER_TORCH = ("fail", "skip", "compare")
_WRITTEN = "graph_snapshot_written"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("commfuse", "graphs compiled by commfuse-fx").addoption(
        "--graph-update",
        action="store_true",
        help="write the goldens of graph_snapshot that fail or are missing, in the tests named on the command line",
    )
    parser.addini(
        "graph_snapshot_other_torch",
        'what graph_snapshot does with a golden of another torch: "fail", "skip" the test, or "compare" the rest',
        default="fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    choice = config.getini("graph_snapshot_other_torch")
    if choice not in _OTHER_TORCH:
        allowed = ", ".join(f'"{each}"' for each in _OTHER_TORCH)
        raise pytest.UsageError(f"graph_snapshot_other_torch is {choice!r}; use one of {allowed}")
    # Workers of pytest-xdist run what the process that started them has checked.
    if config.getoption("graph_update") and not hasattr(config, "workerinput"):
        _check_update(config)


def _check_update(config: pytest.Config) -> None:
    """Goldens are written on purpose only: by people, for tests they name."""
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false"):
        raise pytest.UsageError(
            f"--graph-update is refused where CI is set (CI={os.environ['CI']!r}): goldens are made and reviewed by "
            "people; run it on your machine and commit the result"
        )
    hint = "name the tests whose goldens are to be written, such as: pytest --graph-update test_graph.py::test_step"
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        raise pytest.UsageError(f"--graph-update without tests; {hint}")
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        if not path.is_file():
            raise pytest.UsageError(f"--graph-update with {argument}, which is no test file and no test; {hint}")


@pytest.fixture
def graph_snapshot(request: pytest.FixtureRequest) -> Iterator[GraphSnapshot]:
    """`graph_snapshot.check(lowered)` holds a compiled graph against a golden in `__graphs__` next to the test."""
    from commfuse_fx.testing.snapshot import GraphSnapshot, SnapshotTest

    node, config = request.node, request.config
    names = tuple(each.name for each in node.listchain() if isinstance(each, (pytest.Class, pytest.Item)))

    def wrote(path: Path) -> None:
        node.user_properties.append((_WRITTEN, _relative(path, config)))

    with _without_torch_traces():
        yield GraphSnapshot(
            SnapshotTest(
                file=node.path,
                names=names,
                command=f"pytest --graph-update {shlex.quote('::'.join((_relative(node.path, config), *names)))}",
                other_torch=config.getini("graph_snapshot_other_torch"),
                update=config.getoption("graph_update"),
                wrote=wrote,
            )
        )


@contextmanager
def _without_torch_traces() -> Iterator[None]:
    """Keep torch's structured trace, dozens of lines for every compile, out of what pytest shows of a failed test."""
    trace = logging.getLogger("torch.__trace")
    level = trace.level
    if "TORCH_TRACE" not in os.environ:
        trace.setLevel(logging.WARNING)
    try:
        yield
    finally:
        trace.setLevel(level)


def _relative(path: Path, config: pytest.Config) -> str:
    """As seen from where pytest was started, where that is possible."""
    try:
        return os.path.relpath(path, config.invocation_params.dir)
    except ValueError:  # another drive
        return str(path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # Reports travel from the workers of pytest-xdist with their properties.
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    written = sorted({str(value) for name, value in found if name == _WRITTEN})
    if written:
        terminalreporter.section("goldens written")
        for path in written:
            terminalreporter.line(path)
