"""What the fixture `graph_snapshot` gives to a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.support.checks import show
from commfuse_fx.testing.check_lowered import check_lowered
from commfuse_fx.testing.goldens import Comparison, compare, golden_path, read_golden, write_golden

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")


@dataclass(frozen=True)
class SnapshotTest:
    """The test that checks, and how the run was started.

    file: of the test. names: of its classes and function. command: what makes its goldens. other_torch: "fail", "skip"
    or "compare". update: whether to write goldens that fail. wrote: is told which were written.
    """

    file: Path
    names: tuple[str, ...]
    command: str
    other_torch: str
    update: bool
    wrote: Callable[[Path], None]


class GraphSnapshot:
    """The fixture `graph_snapshot` holds graphs of one test against goldens in `__graphs__` next to its file."""

    def __init__(self, test: SnapshotTest) -> None:
        self._test = test
        self._checked: set[str | None] = set()

    def check(self, lowered: Lowered, *, name: str | None = None) -> None:
        """Fail the test, with the differences, unless the canonical text of the graph is that of its golden.

        name: tells several checks of one test apart; letters, digits, `_`, `.` and `-`.

        A missing golden fails too. One of another version of torch fails, skips the test or is compared without that
        line, as the ini option `graph_snapshot_other_torch` says. With `--graph-update` the golden is written instead
        of failing.

        Raises ConfigTypeError or ConfigValueError for a bad argument, and for a second check under one name.
        """
        __tracebackhide__ = True
        check_lowered(lowered, "graph_snapshot.check")
        self._check_name(name)
        path, text = golden_path(self._test.file, self._test.names, name), lowered.text()
        golden = read_golden(path)
        found = None if golden is None else compare(golden, text)
        if found is not None and self._passes(found):
            return
        if self._test.update:
            write_golden(path, text)
            self._test.wrote(path)
        elif found is None:
            self._fail(f"there is no golden {self._show(path)}; make it: {self._test.command}")
        elif found.is_other_torch:
            self._other_torch(path, found)
        else:
            self._fail(
                f"the graph differs from its golden {self._show(path)}\n{found.report}\n\n"
                f"if that is meant, make the golden again: {self._test.command}"
            )

    def _passes(self, found: Comparison) -> bool:
        return not found.differs and (not found.is_other_torch or self._test.other_torch == "compare")

    def _other_torch(self, path: Path, found: Comparison) -> None:
        __tracebackhide__ = True
        title = (
            f"the golden {self._show(path)} is of another torch: it was made with torch {found.golden_torch}, "
            f"this is torch {found.torch}"
        )
        if self._test.other_torch == "skip":
            import pytest

            pytest.skip(f"{title}; the graph {'differs too' if found.differs else 'is the same'}")
        rest = f"The graph differs too\n{found.report}" if found.differs else "Apart from that the graph is the same"
        self._fail(
            f"{title}\n{rest}\n\nmake the golden again with this torch: {self._test.command}\n"
            'or set the ini option graph_snapshot_other_torch to "compare" (only the graphs count) or "skip"'
        )

    def _check_name(self, name: str | None) -> None:
        where = "graph_snapshot.check: name"
        if name is not None:
            if not isinstance(name, str):
                raise ConfigTypeError(f"{where} is {show(name)}; give a str, or None")
            if not _NAME.fullmatch(name):
                raise ConfigValueError(
                    f"{where} is {show(name)}; give 1 to 60 letters, digits, _, . or -, the first one no . or -"
                )
        if name in self._checked:
            again = "without a name" if name is None else f"with name={name!r}"
            raise ConfigValueError(
                f"graph_snapshot.check was called twice {again} in {self._test.names[-1]}; give each check of a test a "
                'name of its own, such as check(lowered, name="train")'
            )
        self._checked.add(name)

    def _show(self, path: Path) -> str:
        return f"{path.parent.name}/{path.name}"

    def _fail(self, message: str) -> None:
        __tracebackhide__ = True
        import pytest  # here, so that the assertions can be used without it

        pytest.fail(message, pytrace=False)
