"""Where the backward ends, and gradients in memory of their own."""

from __future__ import annotations

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like


def end_of_backward(program: Program) -> fx.Node:
    """The first node of the update phase that ends the graph, or the output."""
    node = program.output
    while node.prev.op == "call_function" and info(node.prev).phase == "update":
        node = node.prev
    return node


def separate_gradients(build: Builder) -> bool:
    """Give every parameter a gradient in memory of its own, as autograd does."""
    program = build.program
    roots = Roots(program.graph)
    owners: dict[fx.Node, str] = {}
    modified = False
    for name, grad in program.grads.items():
        root = roots[grad]
        if root.op == "call_function" and root not in owners:
            owners[root] = name
            continue
        with build.before(end_of_backward(program)):
            spec = tensor_spec(grad)
            program.grads[name] = build.call(
                aten.clone.default,
                (grad,),
                spec=dense_like(spec),
                like=info(grad),
                name=f"reduce/{name}/own",
                phase="backward",
            )
        modified = True
    return modified
