"""Fused and list ops take parameters, gradients and states for blocks of memory in one order: they have to be.

Why: docs/decisions.md, "Fused and list ops run on blocks of memory only".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from commfuse_fx.ir.core.meta import Spec, TensorSpec, info, same_layout
from commfuse_fx.ir.core.program import Program


def takes_blocks(node: fx.Node) -> bool:
    """Whether this node of an update works through the memory of its lists, whatever their strides say."""
    if node.op != "call_function" or info(node).phase != "update":  # a list op of the model's own looks at strides
        return False
    return _name(node.target).startswith(("aten::_fused_ada", "aten::_fused_sgd", "aten::_foreach_"))


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return "" if schema is None else str(schema.name)


def check_blocks(program: Program, fail: Callable[[fx.Node, str], None]) -> None:
    """Call `fail` for a fused or list op whose operands, as recorded, are no blocks in one order."""
    for node in program.graph.nodes:
        if takes_blocks(node) and (wrong := unequal_blocks(fx.node.map_arg(node.args, _spec_of_list))) is not None:
            fail(node, wrong)


def _spec_of_list(node: fx.Node) -> Any:
    return info(node).spec


def unequal_blocks(args: Sequence[Any]) -> str | None:
    """Which of these lists of tensors (as specs) do not lie alike and without gaps; None where all do."""
    lists: list[Sequence[Spec]] = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    if not lists:
        return None
    for position, first in enumerate(lists[0]):
        for each in lists:
            other = each[position]
            if not isinstance(first, TensorSpec) or not isinstance(other, TensorSpec) or other.shape != first.shape:
                continue  # counts of steps, and numbers
            if not other.is_dense or not same_layout(first.shape, first.stride, other.stride):
                return (
                    f"takes its operands for blocks of memory in one order, but entry {position} of its lists has "
                    f"strides {first.stride} and {other.stride} (shape {list(first.shape)})"
                )
    return None


class LayoutConflict(Exception):
    """The present state of parameters and optimizer does not allow this plan.

    `remedy`: "separate" updates, "opaque" ones, or to "capture" the model again as it lies in memory now.
    """

    def __init__(self, remedy: str, reason: str) -> None:
        super().__init__(reason)
        self.remedy = remedy
