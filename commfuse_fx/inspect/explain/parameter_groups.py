"""Parameters that lie alike in repeated blocks, one line for all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from commfuse_fx.ir.core.placement import R
from commfuse_fx.ir.core.program import Parameter

WHOLE = "whole"


@dataclass(frozen=True)
class ParameterGroup:
    """Some parameters with one layout.

    name: of the only one, or that of all with `*` in place of numbers, or of the first one where others of that name
        lie in another way or have another shape.
    count: how many there are.
    layout: such as "S(0) on dp", or "whole".
    """

    name: str
    count: int
    layout: str

    def __str__(self) -> str:
        if self.count == 1:
            return self.name
        return f"{self.name} ({self.count})" if "*" in self.name else f"{self.name} and {self.count - 1} more"


def parameter_groups(params: Mapping[str, Parameter]) -> list[ParameterGroup]:
    """All parameters, by the order of the first one of each group."""
    kinds: dict[str, set[tuple[object, str]]] = {}  # of a pattern's parameters: shape and layout
    for name, param in params.items():
        for pattern in name_patterns(name):
            kinds.setdefault(pattern, set()).add(((param.whole or param.spec).shape, _layout(param)))
    found: dict[tuple[str, str], list[str]] = {}
    for name, param in params.items():
        patterns = name_patterns(name)
        alike = next((pattern for pattern in patterns if len(kinds[pattern]) == 1), patterns[-1])
        found.setdefault((alike, _layout(param)), []).append(name)
    return [
        ParameterGroup(pattern if len(names) > 1 and len(kinds[pattern]) == 1 else names[0], len(names), layout)
        for (pattern, layout), names in found.items()
    ]


def name_patterns(name: str) -> tuple[str, str]:
    """The name with `*` in place of all numbers, and of the first one, which is that of a block."""
    number = r"(?<![^.])\d+(?![^.])"
    return re.sub(number, "*", name), re.sub(number, "*", name, count=1)


def _layout(param: Parameter) -> str:
    """Axes that divide it alike stand together."""
    groups: dict[str, list[str]] = {}
    for axes, placement in param.layout:
        if placement != R:
            groups.setdefault(str(placement), []).append(axes)
    found = [f"{placement} on {','.join(axes)}" for placement, axes in groups.items()]
    if param.shard and not param.rows_alone:
        found.append(f"updated in parts on {param.shard}")
    return "; ".join(found) or WHOLE
