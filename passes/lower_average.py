"""Write averages as sum and division: not every backend averages, and the division can often be had for nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.collectives import group_of, wait_of
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.meta import NodeInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.program import Program
from commfuse_fx.passes.simplify import replace_all

# Fused updates divide gradients by `grad_scale` while they read them: no pass over memory of its own.
_SCALES = (
    aten._fused_adam_.default,
    aten._fused_adamw_.default,
    aten._fused_sgd_.default,
    aten._fused_adagrad_.default,
)


@dataclass(frozen=True)
class LowerAverage:
    name: str = "lower_average"
    requires: tuple[str, ...] = ("fused",)
    ensures: tuple[str, ...] = ("averaged",)

    def __call__(self, program: Program) -> bool:
        averages = [node for node in program.collectives() if _is_average(node)]
        waits = {wait_of(node): program.mesh.size(group_of(node)) for node in averages}
        for node in averages:
            details = info(node)
            assert details.collective is not None
            details.collective = replace(details.collective, reduce_op="sum")
            node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)
        build = Builder(program)
        scaled = _scale_in_updates(build, waits)
        _divide(build, {wait: size for wait, size in waits.items() if wait not in scaled})
        return bool(averages)


def _is_average(node: fx.Node) -> bool:
    collective = info(node).collective
    return collective is not None and collective.reduce_op == "avg"


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
    scaled: dict[fx.Node, None] = {}
    for update in [node for node in build.graph.nodes if node.target in _SCALES]:
        sums = [_wait_behind(grad, waits) for grad in update.args[1]]
        if any(wait is None for wait in sums):
            continue
        sizes = dict.fromkeys(waits[wait] for wait in sums if wait is not None)
        if len(sizes) != 1:
            continue
        found = [wait for wait in sums if wait is not None]
        if not all(_only_serves(wait, update) for wait in dict.fromkeys(found)):
            continue
        (size,) = sizes
        device = tensor_spec(found[0]).device
        scale = TensorSpec((), torch.float32, (), device)
        name = f"{info(update).name}/world_size"
        with build.before(update):
            kwargs = {"dtype": torch.float32, "device": torch.device(device)}
            like = NodeInfo("update")
            node = build.call(aten.full.default, ([], float(size)), kwargs, spec=scale, like=like, name=name)
        update.kwargs = {**update.kwargs, "grad_scale": node}
        scaled.update(dict.fromkeys(found))
    return scaled


def _wait_behind(grad: fx.Node, waits: dict[fx.Node, int]) -> fx.Node | None:
    while grad not in waits:
        if not is_view(grad):
            return None
        grad = grad.all_input_nodes[0]
    return grad


def _only_serves(node: fx.Node, update: fx.Node) -> bool:
    """True when all that is ever done with this value, or views of it, is that update."""
    return all(user is update or (is_view(user) and _only_serves(user, update)) for user in node.users)
