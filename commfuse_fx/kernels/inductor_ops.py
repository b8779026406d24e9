"""Which ops the regions that Inductor compiles leave out, and why.

Why: docs/decisions.md, "Inductor compiles what lies between collectives, and the plan stays the authority".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.kernels.recurrent import lstm_layer, lstm_layer_backward

aten = torch.ops.aten

_QUICKER_ON_CPU = (
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
)
"""Ops whose own kernels take less time than those that Inductor makes of them: a convnet took 0.93."""

_SCATTERING = (
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.col2im.default,
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten.index_reduce.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    aten.put.default,
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.unfold_backward.default,
)
"""Ops that write anywhere in their result, or that Inductor decomposes into such.

In C++ it may put what reads a row into the loop that still writes to it. Where it gives a loop other bounds, it forgets
that the memory was written to (torch 2.13).
"""

_SIZED_BY_MACHINE = (lstm_layer, lstm_layer_backward)
"""Ops with results whose size only the machine knows, or that take such."""

_COMPUTED_WRONGLY = (
    aten.bernoulli.default,  # draws numbers of the probabilities' type, so in float64 other ones than PyTorch
    aten.diagonal_scatter.default,  # writes right into an expanded tensor, so to all places that share an element
    aten.hardsigmoid_backward.default,  # multiplies by 1 / 6, PyTorch in float64 by what float32 has for it
    aten.multilabel_margin_loss_forward.default,  # takes all labels, PyTorch those before the first -1
    aten.rrelu_with_noise_functional.default,  # returns no noise in evaluation, PyTorch one of the input's shape
    aten.soft_margin_loss_backward.default,  # subtracts 1 from a sigmoid: small gradients are 0
    aten.upsample_nearest2d_backward.default,  # goes by the sizes alone, PyTorch by the scale factors
)
"""Ops of which Inductor computes something else (torch 2.13)."""

_REFUSED = (
    aten._ctc_loss.default,
    aten._grouped_mm.default,  # takes only bfloat16
)
"""Ops that Inductor refuses, and their regions with them (torch 2.13)."""

_BY_STRIDES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""Ops that go by how a tensor lies in memory. Inside of a region Inductor may have laid it out otherwise."""

_COMPARISONS = (aten.eq.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.ne.Tensor)
"""Ops that compare numbers. Inside of a region Inductor may not have rounded them: in bfloat16 none is the maximum."""

SETTINGS = {"triton.mix_order_reduction": False}
"""Settings under which Inductor computes what PyTorch does.

On a GPU, a kernel that sums over rows and over columns may count rows behind the last one. Sums that are to lie in one
tensor, such as the gradients of its halves, it leaves unwritten (torch 2.13).
"""

LEFT_OUT = frozenset((*_SIZED_BY_MACHINE, *_COMPUTED_WRONGLY, *_REFUSED))
"""Ops that are in no region."""

LEFT_OUT_ON_CPU = frozenset((*_QUICKER_ON_CPU, *_SCATTERING))
"""Ops that are in no region where they run on a CPU."""

_POOLS_BACKWARD = (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
_UPSAMPLES = (aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default)
_DIVIDES = (aten.div.Scalar_mode, aten.div.Tensor_mode)
_FLOOR_DIVIDES = (aten.floor_divide.default, aten.floor_divide.Scalar)
_PLACES = (aten.argmax.default, aten.argmin.default)
_OF_BYTES = (
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.max.default,
    aten.min.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default,
)


def is_computed_wrongly(node: fx.Node) -> bool:
    """Whether Inductor computes something else from the node's arguments, though not from all (torch 2.13).

    It divides the gradient of a window that reaches over the border, as some do with `ceil_mode`, by the whole window.
    It applies a scale factor to a dimension that keeps its size. It rounds a quotient before it takes the floor: of
    1.0 // 0.1 it makes 10, PyTorch 9. It counts the place of the largest of all elements as they lie in memory.
    Of bytes it takes -1 for the smallest one, returns `any` as bool, and rounds pixels otherwise.
    """
    args: Any = node.args
    if node.target in _POOLS_BACKWARD:
        return bool(args[5])
    if node.target in _UPSAMPLES:
        sizes = zip(args[1], tensor_spec(args[0]).shape[2:], args[2:], strict=False)
        return any(scale is not None and new == old for new, old, scale in sizes)
    if node.target in _FLOOR_DIVIDES or (node.target in _DIVIDES and node.kwargs.get("rounding_mode") == "floor"):
        return tensor_spec(node).dtype.is_floating_point
    if node.target in _OF_BYTES:
        return tensor_spec(args[0]).dtype == torch.uint8
    if node.target in _PLACES:
        dim = args[1] if len(args) > 1 else node.kwargs.get("dim")
        return dim is None and len(tensor_spec(args[0]).shape) > 1
    return False


def looks_like_attention(nodes: Iterable[fx.Node]) -> bool:
    """Whether the nodes compute a softmax and products of batches of matrices.

    Inductor's patterns take that for attention whichever dimension the softmax is over, and however the keys are
    permuted (torch 2.13).
    """
    targets = {node.target for node in nodes}
    return aten.bmm.default in targets and not targets.isdisjoint((aten._softmax.default, aten.amax.default))


def found_in_memory(node: fx.Node) -> list[fx.Node]:
    """The inputs that no op of the node's own region may have made."""
    if node.target in _BY_STRIDES:
        return node.all_input_nodes[:1]
    return [value for value in node.all_input_nodes if node.target in _COMPARISONS and _is_rounded(value)]


def _is_rounded(value: fx.Node) -> bool:
    spec = info(value).spec
    return isinstance(spec, TensorSpec) and spec.dtype.is_floating_point
