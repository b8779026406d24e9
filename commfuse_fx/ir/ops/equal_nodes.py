"""Which nodes compute the same: they call one op with equal arguments."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx

from commfuse_fx.ir.core.meta import info


def equality_key(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> Hashable:
    """A key that is equal for nodes that compute the same from the same memory, if they have no effects and draw no
    random numbers.

    same: nodes that are known to compute what another one does, and that one.
    """

    def key(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return same.get(value, value)
        if isinstance(value, (list, tuple)):
            return tuple(map(key, value))
        # Numbers of different types are equal, and so are 0.0 and -0.0.
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)

    kwargs = tuple((name, key(value)) for name, value in sorted(node.kwargs.items()))
    return node.target, key(node.args), kwargs, info(node).spec
