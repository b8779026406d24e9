"""Updates that work on flat tensors: one in place of several parameters, and one in place of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program, Segment
from commfuse_fx.ir.rows.shard_rows import is_parameter
from commfuse_fx.ir.updates.updates import gradients_of, is_node_list, is_scalar, unclipped


@dataclass(frozen=True)
class FlatRun:
    """Parameters of one update that are to lie in one flat tensor.

    positions: theirs in the lists of the update, in the order in which they lie. segment: their places in the tensor.
    reduced: yields their gradients, which begin there at `offset` (elements).
    """

    positions: tuple[int, ...]
    segment: Segment
    reduced: fx.Node
    offset: int


def use_flat_parameters(build: Builder, owner: int, runs: Sequence[FlatRun], nodes: Sequence[fx.Node]) -> None:
    """Replace the entries of each run in an update's lists by one: flat parameters and flat gradients.

    owner: the number of the update. nodes: those that make it.
    """
    program = build.program
    update = program.updates[owner]
    count = len(update.segments)
    gradients = gradients_of(nodes)
    segments: dict[int, Segment] = {}
    params: dict[int, fx.Node] = {}
    grads: dict[int, fx.Node] = {}
    dropped: dict[int, None] = {}
    for run in runs:
        first = run.positions[0]
        dropped.update(dict.fromkeys(run.positions[1:]))
        segments[first] = run.segment
        name, numel = run.segment.members[0][0], run.segment.numel
        flat = TensorSpec.flat(numel, program.params[name].spec)
        params[first] = build.placeholder("flat", name, flat, owner)
        grads[first] = _flat_gradient(build, owner, run, [gradients[i] for i in run.positions], nodes[0])

    def shorten(items: Sequence[Any], instead: dict[int, Any]) -> list[Any]:
        return [instead.get(i, item) for i, item in enumerate(items) if i not in dropped]

    update.segments = shorten(update.segments, segments)
    for node in nodes:
        args = list(node.args)
        for i, arg in enumerate(args):
            if is_node_list(arg) and len(arg) == count:  # type: ignore[arg-type]
                is_params = all(is_parameter(item) for item in arg)  # type: ignore[union-attr, arg-type]
                args[i] = shorten(arg, params if is_params else grads)  # type: ignore[arg-type]
        node.args = tuple(args)
        details = info(node)
        if isinstance(details.spec, tuple) and len(details.spec) == count:
            details.spec = tuple(shorten(details.spec, {i: tensor_spec(p) for i, p in params.items()}))
    for state in _states(program, owner):
        details = info(state)
        assert isinstance(details.spec, tuple)
        instead = {} if is_scalar(program.sources[state].name) else {i: tensor_spec(p) for i, p in params.items()}
        details.spec = tuple(shorten(details.spec, instead))


def _flat_gradient(build: Builder, owner: int, run: FlatRun, gradients: Sequence[fx.Node], update: fx.Node) -> fx.Node:
    """One gradient in place of these, of what has been reduced: cast and clipped as each of them is.

    update: the first node of the update.
    """
    values = [unclipped(gradient) for gradient in gradients]
    is_cast, is_clipped = values[0].target is aten._to_copy.default, values[0] is not gradients[0]
    name = run.segment.members[0][0]
    label = f"update.{owner}/grads.{name}"
    # The norm of clipped gradients comes ahead of all updates, and casts come ahead of that.
    early = is_cast and is_clipped
    with build.before(min(values) if early else update):
        spec = TensorSpec.flat(run.segment.numel, tensor_spec(run.reduced))
        of_reduced = f"update/grads.{name}" if early else label
        value = build.strided(run.reduced, spec, run.offset, of_reduced, phase="update", module="")
        if is_cast:
            value = build.cast(value, tensor_spec(values[0]).dtype, f"{of_reduced}.cast")
        for (member, offset), part in zip(run.segment.members, values, strict=True) if early else ():
            view = build.strided(value, tensor_spec(part), offset, f"update/grads.{member}.cast")
            part.replace_all_uses_with(view)
    if not is_clipped:
        return value
    with build.before(update):
        # In place: several runs of a bucket lie in one block of memory, of which nobody else needs this part.
        args = (value, gradients[0].args[1])
        return build.call(aten.mul_.Tensor, args, spec=tensor_spec(value), like=info(value), name=f"{label}.clipped")


def _states(program: Program, owner: int) -> list[fx.Node]:
    """The inputs that hold the state of an update."""
    return [node for node, source in program.sources.items() if source.kind == "state" and source.owner == owner]
