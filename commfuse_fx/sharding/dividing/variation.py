"""Keep `NodeInfo.varies`, the mesh axes along which ranks hold different values, while a graph is being divided."""

from __future__ import annotations

from torch import fx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.ops.redistribution import gather_parts, sum_partial


def varies(node: fx.Node, group: str) -> None:
    """Note that the node's value differs between the ranks of this group."""
    info(node).varies = _joined(info(node).varies, group)


def agrees(node: fx.Node, group: str) -> None:
    """Note that the node's value is the same on the ranks of this group."""
    info(node).varies = _without(info(node).varies, group)


def varies_as_inputs(node: fx.Node) -> None:
    """Note that the node's value differs along the axes along which one of its inputs does.

    This is for steps inside an op. A collective that gives all ranks the same result removes its axes.
    """
    found: str | None = ""
    for given in node.all_input_nodes:
        found = _joined(found, info(given).varies)
    if node.target in (sum_partial, gather_parts):
        found = _without(found, str(node.args[1]))
    info(node).varies = found


def _joined(one: str | None, other: str | None) -> str:
    return ",".join(dict.fromkeys(axis for each in (one, other) for axis in (each or "").split(",") if axis))


def _without(one: str | None, group: str) -> str:
    leaving = group.split(",")
    return ",".join(axis for axis in (one or "").split(",") if axis and axis not in leaving)
