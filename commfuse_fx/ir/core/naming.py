"""Stable names: module path, phase, op and ordinal, so that inserting one node does not rename the others.

Why: docs/decisions.md, "Text, not objects, is what is compared".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from commfuse_fx.ir.core.meta import info

PHASE_TAG = {"input": "in ", "forward": "fwd", "backward": "bwd", "update": "upd"}


def op_name(target: Any) -> str:
    """`aten.mm`, `aten.mm.out`, `_c10d_functional.all_reduce_`, `getitem`."""
    if hasattr(target, "_schema"):
        text = str(target)
        return text.removesuffix(".default")
    return str(getattr(target, "__name__", target))


def op_label(target: Any) -> str:
    """The last part of the op's name without namespace and overload: `mm`."""
    if hasattr(target, "_schema"):
        return str(target._schema.name).split("::")[-1]
    return op_name(target)


_ROWS = "/rows"


def rows_of(parameter: str) -> str:
    """The member of a collective that stands for some rows of a parameter's gradient."""
    return parameter + _ROWS


def parameter_of(member: str) -> str:
    """The parameter whose gradient, or some rows of it, a member of a collective is. No parameter's name has a "/"."""
    return member.removesuffix(_ROWS)


class Names:
    """Hands out names that are unique within one program."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._taken: dict[str, None] = {}

    def copy(self) -> Names:
        other = Names()
        other._next = dict(self._next)
        other._taken = dict(self._taken)
        return other

    def state(self) -> tuple[dict[str, int], list[str]]:
        """The next number of each numbered name, and the names that are taken: what `restored` takes."""
        return dict(self._next), list(self._taken)

    @classmethod
    def restored(cls, numbers: Mapping[str, int], taken: Iterable[str]) -> Names:
        """Names that go on where others were."""
        made = cls()
        made._next = dict(numbers)
        made._taken = dict.fromkeys(taken)
        return made

    def reserve(self, name: str) -> str:
        """Take exactly this name; a number is added only if it is taken already."""
        if name in self._taken:
            return self.numbered(name)
        self._taken[name] = None
        return name

    def release(self, name: str) -> None:
        """The node of this name is gone."""
        self._taken.pop(name, None)

    def numbered(self, base: str) -> str:
        """`base.0`, `base.1`, ..."""
        ordinal = self._next.get(base, 0)
        while f"{base}.{ordinal}" in self._taken:
            ordinal += 1
        self._next[base] = ordinal + 1
        name = f"{base}.{ordinal}"
        self._taken[name] = None
        return name

    def of_traced(self, node: fx.Node) -> str:
        """The name of a node that came out of tracing."""
        details = info(node)
        phase = "" if details.phase == "forward" else "grad."
        return self.numbered(f"{details.module}/{phase}{op_label(node.target)}")
