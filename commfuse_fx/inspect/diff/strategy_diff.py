"""What differs between two files of strategies, for people who review one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.render import fenced, plain
from commfuse_fx.inspect.explain.parameter_groups import name_patterns
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.support.checks import show
from commfuse_fx.support.long_lists import shortened

_GIVE = "give two files that strategy_ckpt_save_file has written"
_MOST_LINES = 40

_KIND = re.compile(r'"kind"\s*:\s*"strategies"')
_HEAD = 1000
"""A file says its kind in so many first characters."""


@dataclass(frozen=True)
class StrategyChange:
    """Entries of a strategy file that differ in the same way.

    name: of the entry, or with `*` in place of numbers if all entries of such names differ in this way.
    count: how many there are. before, after: what each file says; None where it has no such entry.
    """

    name: str
    count: int
    before: str | None
    after: str | None


@dataclass(frozen=True)
class StrategyDiff:
    """A diff says what differs between two files of strategies.

    before, after: what was compared, for people.
    whole: what files say of the whole step: the mesh, the level of the parallel optimizer, numbers of blocks.
    parameters, ops: entries that differ, in the order of the files.
    entries: how many entries each file has.
    """

    before: str
    after: str
    whole: tuple[StrategyChange, ...]
    parameters: tuple[StrategyChange, ...]
    ops: tuple[StrategyChange, ...]
    entries: tuple[int, int]

    @property
    def is_same(self) -> bool:
        """Nothing differs."""
        return not (self.whole or self.parameters or self.ops)

    def text(self) -> str:
        """A report in plain lines."""
        lines = [self._headline(), f"- {plain(self.before)}", f"+ {plain(self.after)}"]
        for title, found in self._sections():
            lines += [title, *(f"  {line}" for line in found)]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The report as JSON with a version in "schema"."""
        return json.dumps({"schema": 1, "is_same": self.is_same, **asdict(self)}, indent=1)

    def markdown(self) -> str:
        """The report for a comment on a pull request, with details folded and long lists cut."""
        parts = [f"### commfuse diff: {self._headline()}"]
        parts.append(fenced([f"- {plain(self.before)}", f"+ {plain(self.after)}"]))
        for title, found in self._sections():
            shown = shortened(found, _MOST_LINES, "... and {} more lines")
            parts.append(f"<details><summary>{title}</summary>\n\n{fenced(shown)}\n\n</details>")
        return "\n\n".join(parts) + "\n"

    def _headline(self) -> str:
        if self.is_same:
            return f"the same strategies ({self.entries[0]} entries)"
        parameters, ops = (sum(each.count for each in found) for found in (self.parameters, self.ops))
        return f"strategies changed: {parameters} parameters, {ops} ops ({' -> '.join(map(str, self.entries))} entries)"

    def _sections(self) -> Iterator[tuple[str, list[str]]]:
        for title, found in (("the whole step", self.whole), ("parameters", self.parameters), ("ops", self.ops)):
            if found:
                yield title, [plain(_line(each)) for each in found]


def _line(change: StrategyChange) -> str:
    name = change.name if change.count == 1 else f"{change.name} ({change.count})"
    if change.before is None:
        return f"+ {name}: {change.after}"
    if change.after is None:
        return f"- {name}: {change.before}"
    return f"{name}: {change.before} => {change.after}"


def diff_strategies(a: Any, b: Any) -> StrategyDiff | None:
    """The diff of two sources of strategies, which are files or texts; None if neither is one.

    Raises ConfigValueError and its siblings if one alone is, and for strategies that are damaged or of a newer version.
    """
    if not (_has_strategies(a) or _has_strategies(b)):
        return None
    before, after = _strategies(a, "a"), _strategies(b, "b")
    bodies = before._body(), after._body()
    return StrategyDiff(
        _label(a, "a"),
        _label(b, "b"),
        _changes(*map(_of_whole_step, bodies)),
        _changes(*(body["parameters"] for body in bodies)),
        _changes(*(body["ops"] for body in bodies)),
        (_count(bodies[0]), _count(bodies[1])),
    )


def _label(source: Any, name: str) -> str:
    """The path of a file, or the name of the argument that has the text."""
    return name if _is_text(source) else str(source)


def _is_text(source: Any) -> bool:
    return isinstance(source, str) and ("\n" in source or source.lstrip().startswith(("{", "#")))


def _has_strategies(source: Any) -> bool:
    if not isinstance(source, (str, Path)):
        return False
    head = str(source)[:_HEAD]
    if not _is_text(source):
        try:
            if not Path(source).is_file():
                return False
            with open(source, "rb") as file:
                head = file.read(_HEAD).decode("utf-8", "replace")
        except (OSError, ValueError):  # what no file could be called, among others
            return False
    return _KIND.search(head) is not None


def _strategies(source: Any, name: str) -> Strategies:
    if _is_text(source):
        return Strategies.from_json(source, name)
    if isinstance(source, (str, Path)) and not Path(source).is_dir():
        return Strategies.load(source)
    raise ConfigValueError(f"{name} is {show(source)}, but the other one is a file of strategies; {_GIVE}")


def _of_whole_step(body: Mapping[str, Any]) -> dict[str, str]:
    """What stands in a file besides parameters and ops, as texts."""
    return {key: _told(value) for key, value in body.items() if key not in ("parameters", "ops")}


def _told(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{name}={size}" for name, size in value.items())


def _count(body: Mapping[str, Any]) -> int:
    return len(body["parameters"]) + len(body["ops"])


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[StrategyChange, ...]:
    names = dict.fromkeys((*before, *after))
    kinds: dict[str, set[tuple[str | None, str | None]]] = {}  # of all names of a pattern: what each file says
    for name in names:
        for pattern in _patterns(name):
            kinds.setdefault(pattern, set()).add((before.get(name), after.get(name)))
    found: dict[str, StrategyChange] = {}
    for name in _differing(names, before, after):
        alike = next((pattern for pattern in _patterns(name) if len(kinds[pattern]) == 1), name)
        known = found.get(alike, StrategyChange(name, 0, before.get(name), after.get(name)))
        found[alike] = replace(known, name=alike if known.count else name, count=known.count + 1)
    return tuple(found.values())


def _patterns(name: str) -> tuple[str, ...]:
    """The name with `*` in place of the numbers of modules; ops keep the number behind their own name."""
    module, mark, op = name.partition("/")
    return tuple(f"{pattern}{mark}{op}" for pattern in name_patterns(module))


def _differing(names: Iterable[str], before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    return (name for name in names if before.get(name) != after.get(name))
