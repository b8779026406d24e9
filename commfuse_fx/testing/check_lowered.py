"""Checks of arguments that the assertions share."""

from __future__ import annotations

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.inspect.lowered_graphs import refuse_several
from commfuse_fx.support.checks import show


def check_lowered(value: object, where: str) -> Lowered:
    """`value` if it is a Lowered, else ConfigTypeError."""
    refuse_several(value, "lowered")
    if not isinstance(value, Lowered):
        raise ConfigTypeError(f"{where}: lowered is {show(value)}; give what step.lower(*batch) returns")
    return value
