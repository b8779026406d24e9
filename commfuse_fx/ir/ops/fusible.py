"""Which ops a compiler such as Inductor takes into one kernel, and which values are then never in memory."""

from __future__ import annotations

import torch
from torch import fx

from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.regions import regions_of

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten._to_copy.default)

_OF_ROWS = (
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.amax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
)
"""Ops besides those of single elements into whose kernels a compiler takes what makes their inputs."""


def is_pointwise(node: fx.Node) -> bool:
    """Whether PyTorch says of the op that it works element by element."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_of_elements(node: fx.Node) -> bool:
    """Whether the op computes each element from elements of its inputs, or copies them."""
    return node.target in _COPIES or is_pointwise(node)


def takes_in(node: fx.Node) -> bool:
    """Whether a kernel for the op can compute its inputs itself, where an op of single elements makes them."""
    return is_of_elements(node) or node.target in _OF_ROWS


def fused_values(program: Program) -> dict[fx.Node, None]:
    """The values that compiled regions never write to memory: the kernel that computes them is the one that reads them.

    An estimate from the ops. Inductor decides by shapes and sizes as well.
    """
    found: dict[fx.Node, None] = {}
    for region in regions_of(program):
        handed_on = dict.fromkeys(region.outputs)
        for node in reversed(region.nodes):
            if node in handed_on or not (is_view(node) or is_of_elements(node)):
                continue
            if all(user in found if is_view(user) else takes_in(user) for user in node.users):
                found[node] = None
    return found
