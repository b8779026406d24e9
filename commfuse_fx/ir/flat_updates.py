"""Updates that work on flat tensors: one in place of several parameters, and one in place of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.program import Program, Segment
from commfuse_fx.ir.shard_rows import is_parameter
from commfuse_fx.ir.updates import gradients_of, is_node_list, is_scalar


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
    casts = [node.target is aten._to_copy.default for node in gradients_of(nodes)]
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
        with build.before(nodes[0]):
            spec = TensorSpec.flat(numel, tensor_spec(run.reduced))
            grad = build.strided(
                run.reduced, spec, run.offset, f"update.{owner}/grads.{name}", phase="update", module=""
            )
            if casts[first]:
                grad = build.cast(grad, flat.dtype, f"update.{owner}/grads.{name}.cast")
        grads[first] = grad

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


def _states(program: Program, owner: int) -> list[fx.Node]:
    """The inputs that hold the state of an update."""
    return [node for node, source in program.sources.items() if source.kind == "state" and source.owner == owner]
