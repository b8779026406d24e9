"""Python code that was generated for a program, as functions that run."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, overload

from torch import fx

_serial = count()


@dataclass(frozen=True)
class Code:
    """Generated functions.

    node_of_line: the node of each source line.
    handed_on: for each node in `results` of `generate`, the line that hands over its result, and the name of the
        function that gets it.
    namespace: the functions, and the values that they name.

    Tracebacks show its lines, until somebody takes `filename` out of `linecache.cache`.
    """

    source: str
    filename: str
    node_of_line: Mapping[int, fx.Node]
    handed_on: Mapping[fx.Node, tuple[int, str]]
    namespace: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        source: str,
        what: str,
        node_of_line: Mapping[int, fx.Node],
        handed_on: Mapping[fx.Node, tuple[int, str]],
        namespace: dict[str, Any],
    ) -> Code:
        """Compile a source that reads values of a namespace. what: the word for it in tracebacks."""
        filename = f"<commfuse {what} {next(_serial)}>"
        return cls(source, filename, node_of_line, handed_on, _execute(source, filename, namespace))

    def without(self, nodes: Iterable[fx.Node]) -> Code:
        """The same code, in which the results of these nodes no longer go through a function."""
        lines = self.source.splitlines(keepends=True)
        remaining, namespace = dict(self.handed_on), dict(self.namespace)
        for node in nodes:
            if node in remaining:  # not inside of a region
                line, function = remaining.pop(node)
                lines[line - 1] = "\n"  # an empty line, so that the others keep their numbers
                del namespace[function]
        source = "".join(lines)
        return replace(self, source=source, handed_on=remaining, namespace=_execute(source, self.filename, namespace))


class _Lines(Sequence[str]):
    """The lines of a source, which are made when somebody reads them."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source.splitlines())

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        return self._source.splitlines(keepends=True)[at]


def _execute(source: str, filename: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run generated source in a namespace, which then holds its functions. Tracebacks show its lines."""
    exec(compile(source, filename, "exec"), namespace)
    lines: Any = _Lines(source)
    linecache.cache[filename] = (len(source), None, lines, filename)
    return namespace
