"""Simplify the backward of a module if the caller's loss uses only some of its outputs.

Autograd runs no backward that gets no gradient. So what follows from missing gradients only is missing, too: a sum
leaves it out, as autograd does. The backward of an op of torch is linear in all its gradients together, so other ops
get zeros for what is missing. A `torch.autograd.Function` gets zeros if it has another gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from commfuse_fx.capture.trace.function_gradients import FunctionCall
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.halves import split
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.program import Program


def leave_out(program: Program, outputs: Collection[int], functions: Sequence[FunctionCall] = ()) -> None:
    """Let the outputs with these numbers have no gradient. Changes a captured program in place.

    functions: those of the capture.

    Raises CaptureError where a gradient follows from that of no output: nobody knows whether it still counts. So it
    does for a function that eager execution would give None.
    """
    build = Builder(program)
    runs = {name: function.runs_without(outputs) for function in functions for name in function.nodes}
    depends: dict[fx.Node, None] = {program.loss: None}
    for zeros in _given_to_functions(program, build, outputs, functions):
        depends[zeros] = None
    absent: dict[fx.Node, None] = {}
    free: dict[fx.Node, None] = {}  # computed in the backward, of values of the forward alone
    zero: dict[fx.Node, None] = {}  # the same of zeros, which autograd gives to a function for an output without use
    kept: dict[fx.Node, fx.Node] = {}  # a sum -> what is left of it
    for node in split(program)[1]:
        if node in depends:
            continue
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
        elif (name := info(node).name) in runs:
            (depends if runs[name] else absent)[node] = None
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


def refuse_zeros(functions: Sequence[FunctionCall], outputs: Collection[int]) -> None:
    """Raises CaptureError for a function that autograd would not run without the gradients of these outputs. With
    zeros for them it would be run."""
    for function in functions:
        if not function.runs_without(outputs):
            raise CaptureError(
                f"the torch.autograd.Function at {function.source or 'an unknown line'} has no part in this backward, "
                "which begins at some of the outputs only, and could not be left out of it: let the loss use an output "
                "of the model that follows from the function"
            )


def _given_to_functions(
    program: Program, build: Builder, outputs: Collection[int], functions: Sequence[FunctionCall]
) -> list[fx.Node]:
    """Put zeros in the places of gradients that functions miss; returns them."""
    named = {info(node).name: node for node in program.graph.nodes if node.op == "call_function"}
    found = []
    for function in functions:
        missing = function.missing(outputs)
        if missing and function.gets_none:
            raise CaptureError(
                f"the torch.autograd.Function at {function.source or 'an unknown line'} calls "
                "set_materialize_grads(False), and this backward gives it only some of its gradients: leave that call "
                "out, or let the loss use all outputs of the model that follow from the function's results"
            )
        for node in [named[name] for name in missing if name]:
            zeros = _zeros(build, node, node)
            node.replace_all_uses_with(zeros)
            for returned in (program.grads, program.aux):
                returned |= {name: zeros for name, value in returned.items() if value is node}
            found.append(zeros)
    return found


def _zeros(build: Builder, value: fx.Node, user: fx.Node) -> fx.Node:
    spec, name = info(value).spec, f"{info(value).name}/zero"
    assert isinstance(spec, TensorSpec), "a part of several results is taken out before it is used"
    with build.before(user):
        if spec.is_dense:
            return build.zeros(spec, info(value), name)
        size = 1 + sum((count - 1) * step for count, step in zip(spec.shape, spec.stride, strict=True))
        flat = build.zeros(TensorSpec.flat(size if spec.numel else 0, spec), info(value), f"{name}/flat")
        return build.strided(flat, spec, 0, name)
