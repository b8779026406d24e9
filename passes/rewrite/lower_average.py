"""Write averages as sum and division: not every backend averages, and the division can often be had for nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.collectives import collective_of, group_of, wait_of
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.edit import replace_all
from commfuse_fx.ir.meta import NodeInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.program import Program
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
        scaled = _scale_in_updates(build, waits)
        _divide(build, {wait: size for wait, size in waits.items() if wait not in scaled})
        return bool(averages)


def _divide(build: Builder, waits: dict[fx.Node, int]) -> None:
    means: dict[fx.Node, fx.Node] = {}
    for wait, size in waits.items():
        with build.after(wait):
            name = f"{info(wait).name}/mean"
            means[wait] = build.call(aten.div.Scalar, (wait, size), spec=info(wait).spec, like=info(wait), name=name)
    replace_all(build.program, means)
    for wait, mean in means.items():
        mean.args = (wait, waits[wait])


def _scale_in_updates(build: Builder, waits: dict[fx.Node, int]) -> dict[fx.Node, None]:
    """Give updates whose gradients are all sums over groups of one size that size as grad_scale."""
    sums: dict[fx.Node, list[fx.Node]] = {}
    for update in [node for node in build.graph.nodes if node.target in _SCALES]:
        parts = [_waits_behind(grad, waits) for grad in update.args[1]]
        found = list(dict.fromkeys(wait for part in parts for wait in part))
        if all(parts) and len(dict.fromkeys(waits[wait] for wait in found)) == 1:
            sums[update] = found
    while True:
        mixed = [update for update in sums if not all(_only_serves(wait, sums) for wait in sums[update])]
        if not mixed:
            break
        for update in mixed:  # which leaves sums that serve it and others to be divided
            del sums[update]
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
    return dict.fromkeys(wait for found in sums.values() for wait in found)


def _waits_behind(grad: fx.Node, waits: dict[fx.Node, int]) -> list[fx.Node]:
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


def _only_serves(node: fx.Node, updates: Collection[fx.Node]) -> bool:
    """True when all that is ever done with this value, or views of it, is these updates."""
    return all(
        user in updates or ((is_view(user) or user.target in _PASS_ON) and _only_serves(user, updates))
        for user in node.users
    )
