"""The op by which a mark on an activation stands in a traced graph: an identity that says who marked what.

Its gradient is the same op on the gradient, so that both directions get one layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.program import Program
from commfuse_fx.sharding.marking.strategy import TensorStrategy, decode, encode

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define(
    "layout(Tensor x, str strategy, str call, str position, bool differentiable, bool gradient, str place) -> Tensor"
)

LAYOUT = torch.ops.commfuse.layout.default


@dataclass(frozen=True, slots=True)
class NodeMark:
    """What a mark says of one activation.

    number: that of the marked call in its step; kind: as in `logical_dims`; subject: what was marked, such as
    "torch.matmul" or the path of a module, with `index`, the number of the mark among those of the module. position:
    "in0", "in:name", "out0". gradient: whether the node holds the gradient of the tensor that was marked.
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
    """`x` through a node that says `mark`; with `differentiable`, its gradient gets one too."""
    call = f"{mark.number}:{mark.kind}:{mark.index}:{mark.subject}"
    out: torch.Tensor = torch.ops.commfuse.layout(
        x, encode(mark.strategy), call, mark.position, differentiable, mark.gradient, mark.place
    )
    return out


def is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is LAYOUT


def mark_of(node: fx.Node) -> NodeMark:
    """The mark that a node says. The node has to be one for which `is_mark` holds."""
    _, strategy, call, position, _, gradient, place = node.args
    number, kind, index, subject = str(call).split(":", 3)
    return NodeMark(
        decode(str(strategy)), int(number), kind, subject, int(index), str(position), bool(gradient), str(place)
    )


def strip_marks(graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> dict[fx.Node, fx.Node]:
    """Take marks out of a graph: what used them uses the tensor that was marked. nodes: which; all, if not given.

    Returns what stands for each node that is gone. Those who hold nodes of the graph, such as a program its loss, have
    to follow it: see `erase_marks`.
    """
    instead: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if is_mark(node)] if nodes is None else list(nodes):
        marked = node.args[0]
        assert is_mark(node) and isinstance(marked, fx.Node)
        node.replace_all_uses_with(marked)
        graph.erase_node(node)
        instead = {old: marked if new is node else new for old, new in instead.items()} | {node: marked}
    return instead


def erase_marks(program: Program, nodes: Iterable[fx.Node] | None = None) -> None:
    """Take marks out of a program; its loss and gradients stay what they are. nodes: which; all, if not given."""
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
