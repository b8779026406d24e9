"""Write averages as sum and division: not every backend averages, and the division can often be had for nothing.

Why: docs/decisions.md, "Means are sums, divided later".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import collective_of, group_of, wait_of
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.updates.updates import unclipped
from commfuse_fx.kernels.rows import put_rows_
from commfuse_fx.passes.declaration import Pass

# Fused updates divide gradients by `grad_scale` while they read them: no pass over memory of its own.
_SCALES = (
    aten._fused_adam_.default,
    aten._fused_adamw_.default,
    aten._fused_sgd_.default,
    aten._fused_adagrad_.default,
)

# What updates may read sums through, besides views: rows sent again, and copies with the strides of the parameter.
_PASS_ON = (put_rows_, aten.clone.default)

Sizes = Mapping[fx.Node, int]
"""Wait -> over how many ranks it brings a sum."""


@dataclass(frozen=True)
class LowerAverage(Pass):
    name = "lower_average"
    numerics = "reordered"
    requires = ("fused",)
    ensures = ("averaged",)

    def __call__(self, program: Program) -> bool:
        averages = [node for node in program.collectives() if collective_of(node).reduce_op == "avg"]
        waits = {wait_of(node): program.mesh.size(group_of(node)) for node in averages}
        for node in averages:
            info(node).collective = replace(collective_of(node), reduce_op="sum")
            node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)
        build = Builder(program)
        for scale in (_scale_in_updates, _scale_in_clipping):
            for wait in scale(build, waits):
                del waits[wait]
        _divide(build, waits)
        return bool(averages)


def _divide(build: Builder, waits: Sizes) -> None:
    means: dict[fx.Node, fx.Node] = {}
    for wait, size in waits.items():
        with build.after(wait):
            name = f"{info(wait).name}/mean"
            means[wait] = build.call(aten.div.Scalar, (wait, size), spec=info(wait).spec, like=info(wait), name=name)
    replace_all(build.program, means)
    for wait, mean in means.items():
        mean.args = (wait, waits[wait])


def _scale_in_updates(build: Builder, waits: Sizes) -> list[fx.Node]:
    """Give updates whose gradients are all sums over groups of one size that size as grad_scale. Returns the waits that
    need no division any more."""
    updates: dict[fx.Node, Any] = {node: node.args[1] for node in build.graph.nodes if node.target in _SCALES}
    sums = _sums_taken(updates, waits)
    for update, found in sums.items():
        device = tensor_spec(found[0]).device
        scale = TensorSpec((), torch.float32, (), device)
        name = f"{info(update).name}/world_size"
        with build.before(update):
            kwargs = {"dtype": torch.float32, "device": torch.device(device)}
            like = NodeInfo("update")
            size = float(waits[found[0]])
            node = build.call(aten.full.default, ([], size), kwargs, spec=scale, like=like, name=name)
        update.kwargs = {**update.kwargs, "grad_scale": node}
    return _all_of(sums)


def _scale_in_clipping(build: Builder, waits: Sizes) -> list[fx.Node]:
    """Divide the norms of sums, and the coefficients that clip sums. Returns the waits that need no division any more.

    Half precision might not hold the norm of a sum.
    """
    waits = {wait: size for wait, size in waits.items() if tensor_spec(wait).dtype != torch.float16}
    taken: dict[fx.Node, Any] = {}
    for node in build.graph.nodes:
        if node.target is aten._foreach_norm.Scalar and info(node).phase == "update":
            taken[node] = [grad for grad in node.args[0] if tensor_spec(grad).numel]
        elif node.op == "call_function" and (clipped := unclipped(node)) is not node:
            taken[node] = [clipped]
    sums = _sums_taken(taken, waits)
    coefficients: dict[tuple[fx.Node, int], fx.Node] = {}
    for node, found in sums.items():
        size = waits[found[0]]
        if node.target is aten._foreach_norm.Scalar:
            node.replace_all_uses_with(mean := _divided(build, node, size))
            mean.args = (node, size)
            continue
        whole, coefficient = node.args
        assert isinstance(coefficient, fx.Node)
        if (coefficient, size) not in coefficients:
            coefficients[coefficient, size] = _divided(build, coefficient, size)
        node.args = (whole, coefficients[coefficient, size])
    return _all_of(sums)


def _divided(build: Builder, value: fx.Node, size: int) -> fx.Node:
    """A number, or a list of numbers, divided by the size of a group."""
    details = info(value)
    target = aten._foreach_div.Scalar if isinstance(details.spec, tuple) else aten.div.Scalar
    with build.after(value):
        name = f"{details.name}/mean"
        return build.call(target, (value, size), spec=details.spec, like=details, name=name, varies=details.varies)


def _sums_taken(taken: Mapping[fx.Node, Sequence[fx.Node]], waits: Sizes) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that take sums over groups of one size and nothing else, each with the waits that bring the sums, which
    serve no other nodes. taken: the gradients that each takes."""
    sums: dict[fx.Node, list[fx.Node]] = {}
    for node, grads in taken.items():
        parts = [_waits_behind(grad, waits) for grad in grads]
        found = list(dict.fromkeys(wait for part in parts for wait in part))
        if all(parts) and len(dict.fromkeys(waits[wait] for wait in found)) == 1:
            sums[node] = found
    while True:
        mixed = [node for node in sums if not all(_only_serves(wait, sums) for wait in sums[node])]
        if not mixed:
            return sums
        for node in mixed:  # which leaves sums that serve it and others to be divided
            del sums[node]


def _all_of(sums: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    return list(dict.fromkeys(wait for found in sums.values() for wait in found))


def _waits_behind(grad: fx.Node, waits: Sizes) -> list[fx.Node]:
    """What a gradient consists of: one sum, or another with some rows of it; nothing where it is no sum."""
    while grad not in waits:
        if grad.target is put_rows_:
            whole, _, rows = grad.all_input_nodes
            parts = _waits_behind(whole, waits), _waits_behind(rows, waits)
            return [*parts[0], *parts[1]] if all(parts) else []
        if not is_view(grad) and grad.target is not aten.clone.default:
            return []
        grad = grad.all_input_nodes[0]
    return [grad]


def _only_serves(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    """True when all that is ever done with this value, or views of it, is these nodes."""
    return all(
        user in nodes or ((is_view(user) or user.target in _PASS_ON) and _only_serves(user, nodes))
        for user in node.users
    )
