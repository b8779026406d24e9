"""The passes by name, and what is known of their options."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any

from commfuse_fx.errors import ConfigKeyError
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.support.checks import show


@dataclass(frozen=True)
class PassOption:
    """One option of a pass. type: as the class writes it, such as "int | None"."""

    name: str
    type: str
    required: bool
    default: Any


@dataclass(frozen=True)
class PassEntry:
    """One pass. stage: that of the table; requires, ensures: facts, as in `Pass`; purpose: what its file says first."""

    name: str
    stage: str
    make: type[Pass]
    options: tuple[PassOption, ...]
    requires: tuple[str, ...]
    ensures: tuple[str, ...]
    purpose: str

    def option(self, name: str) -> PassOption:
        """Raises ConfigKeyError for an option that the pass does not have."""
        found = next((option for option in self.options if option.name == name), None)
        if found is None:
            known = ", ".join(option.name for option in self.options) or "no options"
            raise ConfigKeyError(f"pass {self.name} has no option {show(name)}; it has {known}")
        return found


def _entry(stage: str, made: type[Pass]) -> PassEntry:
    given: Any = made  # a dataclass, which its type does not say
    options = tuple(
        PassOption(field.name, _written(field.type), field.default is MISSING, field.default) for field in fields(given)
    )
    purpose = " ".join((sys.modules[made.__module__].__doc__ or "").split("\n\n")[0].split())
    return PassEntry(made.name, stage, made, options, made.requires, made.ensures, purpose)


def _written(annotation: Any) -> str:
    """A type as text, whether or not its module leaves annotations as they are written."""
    return annotation if isinstance(annotation, str) else str(getattr(annotation, "__name__", annotation))


PASSES: Mapping[str, PassEntry] = MappingProxyType(
    {made.name: _entry(stage, made) for stage, passes in TABLE.items() for made in passes}
)
"""Name -> pass, in the order in which a compile runs them."""


def find_pass(name: str) -> PassEntry:
    """Raises ConfigKeyError for an unknown name."""
    if name not in PASSES:
        raise ConfigKeyError(f"there is no pass {show(name)}; use one of {', '.join(PASSES)}")
    return PASSES[name]
