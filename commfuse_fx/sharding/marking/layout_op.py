"""The op `commfuse::layout` stands for a mark on an activation in a traced graph. It is an identity.

Its gradient is the same op on the gradient, so that an activation and its gradient get the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.marking.strategy import TensorStrategy, decode, encode

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define(
    "layout(Tensor x, str strategy, str call, str position, bool differentiable, bool gradient, str place) -> Tensor"
)

LAYOUT = torch.ops.commfuse.layout.default


@dataclass(frozen=True, slots=True)
class NodeMark:
    """The mark of one activation.

    strategy: how the activation is divided.
    number: the number of the marked call in its step.
    kind: the kind of the call, as in `logical_dims`.
    subject: the marked function ("torch.matmul") or the path of the marked module.
    index: the number of the mark among those of the module.
    position: the tensor's position in the call: "in0", "in:name" or "out0".
    gradient: whether the node holds the gradient of the marked tensor.
    place: the source line of the mark.
    """

    strategy: TensorStrategy
    number: int
    kind: str
    subject: str
    index: int
    position: str
    gradient: bool
    place: str

    @property
    def is_output(self) -> bool:
        return self.position.startswith("out")


def mark_tensor(x: torch.Tensor, mark: NodeMark, differentiable: bool = True) -> torch.Tensor:
    """Mark `x` in the traced graph; returns the marked tensor. With `differentiable` its gradient is marked too."""
    call = f"{mark.number}:{mark.kind}:{mark.index}:{mark.subject}"
    out: torch.Tensor = torch.ops.commfuse.layout(
        x, encode(mark.strategy), call, mark.position, differentiable, mark.gradient, mark.place
    )
    return out


def is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is LAYOUT


def mark_of(node: fx.Node) -> NodeMark:
    """The mark of a node for which `is_mark` holds."""
    _, strategy, call, position, _, gradient, place = node.args
    number, kind, index, subject = str(call).split(":", 3)
    return NodeMark(
        decode(str(strategy)), int(number), kind, subject, int(index), str(position), bool(gradient), str(place)
    )


def strip_marks(graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> dict[fx.Node, fx.Node]:
    """Remove marks from a graph. Their users get the tensor that was marked. nodes: the marks; None for all.

    Returns the replacement of each removed node, for code that holds nodes of the graph, such as `erase_nodes`.
    """
    instead: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if is_mark(node)] if nodes is None else list(nodes):
        marked = node.args[0]
        assert isinstance(marked, fx.Node)
        node.replace_all_uses_with(marked)
        graph.erase_node(node)
        instead = {old: marked if new is node else new for old, new in instead.items()} | {node: marked}
    return instead


def erase_marks(program: Program, nodes: Iterable[fx.Node] | None = None) -> None:
    """Remove marks from a program, also from its loss, gradients and outputs. nodes: the marks; None for all."""
    erase_nodes(program, [node for node in program.graph.nodes if is_mark(node)] if nodes is None else nodes)


def erase_nodes(program: Program, nodes: Iterable[fx.Node]) -> None:
    """Remove nodes that do nothing from a program: whoever uses one gets its first argument."""
    instead = strip_marks(program.graph, nodes)
    program.loss = instead.get(program.loss, program.loss)
    program.grads = {name: instead.get(grad, grad) for name, grad in program.grads.items()}
    program.aux = {name: instead.get(node, node) for name, node in program.aux.items()}


def _fake(
    x: torch.Tensor, strategy: str, call: str, position: str, differentiable: bool, gradient: bool, place: str
) -> torch.Tensor:
    # The strides of x, so that the graph stays right when the op is taken out of it.
    return x.new_empty_strided(x.shape, x.stride())


def _eager(
    x: torch.Tensor, strategy: str, call: str, position: str, differentiable: bool, gradient: bool, place: str
) -> torch.Tensor:
    return x.clone()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.kept = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    strategy, call, position, differentiable, _, place = ctx.kept
    if differentiable:
        grad = torch.ops.commfuse.layout(grad, strategy, call, position, differentiable, True, place)
    return grad, None, None, None, None, None, None


torch.library.register_fake("commfuse::layout", _fake, lib=_library)
torch.library.impl("commfuse::layout", "CompositeExplicitAutograd", lib=_library)(_eager)
torch.library.register_autograd("commfuse::layout", _backward, setup_context=_keep, lib=_library)
