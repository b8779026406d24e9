"""Simplify the backward of a module if the caller's loss uses only some of its outputs.

The backward is linear in the gradients of all outputs together. So a value that follows only from zero gradients is
zero. A sum leaves it out, as autograd does, and other ops get zeros in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.edit import remove_dead_nodes
from commfuse_fx.ir.halves import split
from commfuse_fx.ir.meta import TensorSpec, info
from commfuse_fx.ir.program import Program


def leave_out(program: Program, outputs: Collection[int]) -> None:
    """Treat the gradients of the outputs with these numbers as zero. Changes a captured program in place.

    Raises CaptureError where a gradient follows from that of no output: nobody knows whether it still counts.
    """
    build = Builder(program)
    depends: dict[fx.Node, None] = {program.loss: None}
    absent: dict[fx.Node, None] = {}
    free: dict[fx.Node, None] = {}  # computed in the backward, of values of the forward alone
    zero: dict[fx.Node, None] = {}  # the same of zeros, which autograd gives to a function for an output without use
    kept: dict[fx.Node, fx.Node] = {}  # a sum -> what is left of it
    for node in split(program)[1]:
        if node.args and node.args[0] is program.loss:
            (absent if node.args[1] in outputs else depends)[node] = None
            continue
        there = [value for value in node.all_input_nodes if value in depends]
        missing = [value for value in node.all_input_nodes if value in absent]
        if (there or missing) and node.target is aten.add.Tensor:
            _refuse([value for value in node.all_input_nodes if value in free])
        if missing and not there:
            absent[node] = None
        elif missing and _is_sum_with(node, there[0]):
            kept[node] = there[0]
            node.replace_all_uses_with(there[0])
        elif there:
            depends[node] = None
            for value in missing:
                node.replace_input_with(value, _zeros(build, value, node))
        else:
            is_zero = node.target is aten.zeros.default or any(value in zero for value in node.all_input_nodes)
            (zero if is_zero else free)[node] = None
    _refuse([value for value in program.grads.values() if value in free])
    for returned in (program.grads, program.aux):
        for name, value in list(returned.items()):
            if value in absent:
                del returned[name]
            while returned.get(name) in kept:
                returned[name] = kept[returned[name]]
    program.set_output()
    remove_dead_nodes(program)


def _refuse(gradients: Sequence[fx.Node]) -> None:
    for node in gradients:
        raise CaptureError(
            f"a gradient that is computed at {info(node).source or 'an unknown line'} follows from the gradient of no "
            "output, and this backward begins at some of the outputs only: let the backward of the "
            "torch.autograd.Function there multiply with the gradient that it gets, or add up all outputs that have a "
            "gradient"
        )


def _is_sum_with(node: fx.Node, other: fx.Node) -> bool:
    """Whether the node adds to `other`, and nothing else happens to it."""
    return node.target is aten.add.Tensor and not node.kwargs and info(node).spec == info(other).spec


def _zeros(build: Builder, value: fx.Node, user: fx.Node) -> fx.Node:
    spec = info(value).spec
    assert isinstance(spec, TensorSpec), "a part of several results is taken out before it is used"
    with build.before(user):
        return build.zeros(spec, info(value), f"{info(value).name}/zero")
