"""An extension of griffe: lines of a docstring that explain a parameter or a field become a list.

Docstrings here name one at the begin of a line: `seconds: how long measuring may take.` Lines that follow it, indented
or not, belong to it up to an empty line or the next name.

Why: docs/decisions.md, "The reference is made from docstrings without sections".
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_MARKERS = ("Default", "not_given")
_FIELD = re.compile(r"^`?((?:\w+, )*\w+)`?: (.*)$")


class Fields(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute, when all of it is known."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_list(obj.docstring.value, names_of(obj))
        for each in obj.parameters if isinstance(obj, griffe.Function) else ():
            if isinstance(each.default, griffe.ExprCall) and str(each.default.function) in _MARKERS:
                each.default = each.default.arguments[0]  # what counts where the argument is not given


def names_of(obj: griffe.Object) -> set[str]:
    """What a docstring may explain: parameters, and of a class its attributes and properties, too."""
    if isinstance(obj, griffe.Function):
        return {each.name for each in obj.parameters}
    if isinstance(obj, griffe.Class):
        return {each.name for each in obj.parameters} | set(obj.members) | set(obj.inherited_members)
    return set()


def as_list(text: str, names: set[str]) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found and {*found.group(1).split(", ")} <= names:
            shown = ", ".join(f"`{name}`" for name in found.group(1).split(", "))
            lines += ["", f"- {shown}: {found.group(2)}"] if not inside else [f"- {shown}: {found.group(2)}"]
            inside = True
        elif inside and line.strip() and not line.startswith("Raises "):
            lines.append(f"    {line.strip()}")
        else:
            lines += [""] * (inside and bool(line.strip())) + [line]
            inside = False
    return "\n".join(lines)
