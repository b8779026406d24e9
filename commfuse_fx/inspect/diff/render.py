"""A diff as plain lines, as JSON and as markdown. Names come from files, so nothing in them may act as markup."""

from __future__ import annotations

import json
from dataclasses import asdict

from commfuse_fx.inspect.diff.result import CollectiveChange, Delta, Differences, HeaderChange, NodeChange
from commfuse_fx.support.long_lists import shortened

SCHEMA = 1

# GitHub takes comments of up to 65,536 characters.
_MOST_LINES = 40
_LONGEST_LINE = 180


def text(diff: Differences) -> str:
    lines = [headline(diff), f"- {plain(diff.before)}", f"+ {plain(diff.after)}"]
    for title, found in sections(diff):
        lines.append(title)
        lines.extend(f"  {line}" for line in found)
    return "\n".join(lines) + "\n"


def to_json(diff: Differences) -> str:
    return json.dumps({"schema": SCHEMA, "kind": diff.kind, "is_same": diff.is_same, **asdict(diff)}, indent=1)


def markdown(diff: Differences) -> str:
    parts = [f"### commfuse diff: {headline(diff)}", fenced([f"- {plain(diff.before)}", f"+ {plain(diff.after)}"])]
    for title, found in sections(diff):
        lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in found]
        shown = shortened(lines, _MOST_LINES, "... and {} more lines")
        parts.append(f"<details><summary>{title}</summary>\n\n{fenced(shown)}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def headline(diff: Differences) -> str:
    """`compute changed: 1 added, 2 changed, 4 renumbered (150 -> 151 nodes)`."""
    groups = ("added", "removed", "changed", "renamed", "renumbered", "moved")
    counts = [f"{len(getattr(diff, name))} {name}" for name in groups if getattr(diff, name)]
    if diff.header:
        counts.append(f"{len(diff.header)} header line(s)")
    before, after = diff.nodes
    nodes = f"({before} -> {after} nodes)" if before != after else f"({after} nodes)"
    return f"{diff.kind}{': ' if counts else ''}{', '.join(counts)} {nodes}"


def sections(diff: Differences) -> list[tuple[str, list[str]]]:
    """(title, lines) of all that is not empty. Titles hold no names."""
    nodes = (
        ("removed", [f"- {_named(each.before, each)}" for each in diff.removed]),
        ("added", [f"+ {_named(each.after, each)}" for each in diff.added]),
        ("changed", [line for each in diff.changed for line in _changed(each)]),
        ("renamed", [_arrow(each) for each in diff.renamed]),
        ("renumbered: only the ordinal of the name differs", [_arrow(each) for each in diff.renumbered]),
        ("moved", [plain(f"{each.after}: {'; '.join(each.details)}") for each in diff.moved]),
    )
    found = [
        ("header", [line for each in diff.header for line in _header(each)]),
        ("collectives", [line for each in diff.collectives for line in _collective(each)]),
        *nodes,
        ("figures", [_delta(each) for each in diff.deltas if each.before != each.after]),
    ]
    return [(title, lines) for title, lines in found if lines]


def plain(value: str) -> str:
    """On one line, and nothing in it that a terminal would act on."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in value)


def fenced(lines: list[str]) -> str:
    content = "\n".join(lines)
    ticks = "```"
    while ticks in content:
        ticks += "`"
    return f"{ticks}text\n{content}\n{ticks}"


def _named(name: str, each: NodeChange) -> str:
    return plain(f"{name}: {each.op} ({each.kind.split()[0]})")


def _arrow(each: NodeChange) -> str:
    return plain(each.after if each.before == each.after else f"{each.before} -> {each.after}")


def _changed(each: NodeChange) -> list[str]:
    return [f"{_arrow(each)}: {plain(each.op)}", *(f"  {plain(detail)}" for detail in each.details)]


def _header(each: HeaderChange) -> list[str]:
    sides = (("-", each.before), ("+", each.after))
    return [plain(f"{sign} {each.name}: {value}") for sign, value in sides if value is not None]


def _collective(each: CollectiveChange) -> list[str]:
    if each.before and each.after:
        name = each.after if each.before == each.after else f"{each.before} -> {each.after}"
    else:
        name = f"+ {each.after}" if each.after else f"- {each.before}"
    lines = [plain(f"{name}{': ' if each.details else ''}{'; '.join(each.details)}")]
    if each.old_members != each.new_members:
        sides = (("-", each.old_members), ("+", each.new_members))
        lines.extend(plain(f"  {sign} members: {', '.join(names)}") for sign, names in sides if names)
    return lines


def _delta(each: Delta) -> str:
    if each.name.endswith("_seconds"):
        what = each.name.removesuffix("_seconds")
        change = f", {each.after / each.before - 1:+.1%}" if each.before else ""
        return f"predicted {what} time: {each.before * 1e3:.3f} -> {each.after * 1e3:.3f} ms{change}"
    return plain(f"{each.name}: {each.before:.0f} -> {each.after:.0f} ({each.after - each.before:+.0f})")
