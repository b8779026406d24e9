"""The collectives of a graph as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import dtype_name, info
from commfuse_fx.ir.core.program import Program

_HEAD = ("name", "kind", "op", "dtype", "group", "bytes", "id", "phase", "members")
_TO_THE_RIGHT = ("bytes", "id")


def collectives_table(program: Program) -> str:
    """One line per collective, in issue order, and a line with their number and bytes. Ends with a line break.

    bytes: payload of the full buffer. id: the explicit fusion id. members: the first, and how many there are.
    """
    rows: list[tuple[str, ...]] = []
    total = 0
    for node in program.collectives():
        each = collective_of(node)
        total += each.nbytes
        rows.append(
            (
                info(node).name,
                each.kind,
                each.reduce_op or "-",
                dtype_name(each.dtype),
                f"{each.group}({program.mesh.size(each.group)})",
                str(each.nbytes),
                "-" if each.fusion_id is None else str(each.fusion_id),
                info(node).phase,
                _members(each.members),
            )
        )
    if not rows:
        return "no collectives\n"
    return f"{aligned((_HEAD, *rows), _TO_THE_RIGHT)}{len(rows)} collective(s), {total} bytes\n"


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[str] = ()) -> str:
    """Lines of columns; the first row is the head, which `to_the_right` names columns of."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [name in to_the_right for name in rows[0]]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _members(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else "-"
