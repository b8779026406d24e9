"""Programs of two halves: the caller gets the outputs of the forward, and starts the backward later, or never.

Why: docs/decisions.md, "Where the caller starts the backward, both halves are one graph".
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like

USED = "used parameters"
"""Among what the graph returns: for each trainable parameter, how many ranks have reached it in the backward."""


def gradient_specs(outputs: Sequence[fx.Node]) -> tuple[Spec, ...]:
    """Of the gradients of these outputs: dense, in the order of the output; None for what cannot have one."""
    return tuple(_gradient_spec(info(output).spec) for output in outputs)


def _gradient_spec(spec: Spec) -> Spec:
    if not isinstance(spec, TensorSpec) or not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return None
    return spec if spec.is_dense else dense_like(spec)


def outputs_of(program: Program) -> list[fx.Node]:
    """What the forward hands to the caller."""
    outputs = program.loss.args[0]
    assert program.has_two_halves and isinstance(outputs, (list, tuple))
    return [node for node in outputs if isinstance(node, fx.Node)]


def split(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls before and behind `hand_over`, in their order."""
    calls = [node for node in program.graph.nodes if node.op in ("call_function", "get_attr")]
    place = calls.index(program.loss)
    return calls[:place], calls[place + 1 :]


def crossing(program: Program) -> list[fx.Node]:
    """What the backward takes from the forward and from the call's inputs, in the order of the graph.

    What is computed once is there without a forward.
    """
    before, behind = split(program)
    made = {*program.sources, *(node for node in before if not info(node).once)}
    run = [node for node in (*behind, program.output) if not info(node).once]
    used = dict.fromkeys(value for node in run for value in node.all_input_nodes)
    return [node for node in program.graph.nodes if node in made and node in used]


def lasting(program: Program) -> list[fx.Node]:
    """Values whose memory nobody may overwrite: the caller holds them, or may run the backward again."""
    if not program.has_two_halves:
        return []
    gradients = [user for user in program.loss.users if user is not program.output]
    return [*outputs_of(program), *crossing(program), *gradients]
