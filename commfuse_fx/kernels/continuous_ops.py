"""Which ops compute nearly the same from nearly the same numbers, and which may have a jump between them.

Why: docs/decisions.md, "Half precision is rounded where a jump follows".
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.ops.fixed_values import SHAPE_ONLY

_HALF = (torch.bfloat16, torch.float16)

_FLOATS = (*_HALF, torch.float32, torch.float64)

_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
_batch_norm_with_update _cudnn_attention_backward _efficient_attention_backward _efficient_attention_forward
_flash_attention_backward _flash_attention_forward _fused_rms_norm _fused_rms_norm_backward _grouped_mm _log_softmax
_log_softmax_backward_data _safe_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_flash_attention_for_cpu_backward _softmax _softmax_backward_data _to_copy _unsafe_index
_unsafe_index_put _weight_norm_interface _weight_norm_interface_backward abs add addbmm addcdiv addcmul addmm addmv
amax amin atan avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm batch_norm_backward
bernoulli.p binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits bmm cat celu clamp
clamp_max clamp_min clone constant_pad_nd convolution convolution_backward copy cos cosh cudnn_batch_norm
cudnn_batch_norm_backward cumsum detach diag_embed diagonal_backward diagonal_scatter div dot elu embedding
embedding_dense_backward embedding_renorm erf erfc exp exp2 expm1 fill flip gather gelu gelu_backward glu
glu_backward group_norm hardsigmoid hardswish hardtanh huber_loss huber_loss_backward index index_add index_copy
index_fill index_put index_select layer_norm leaky_relu lerp lift_fresh_copy linear log log10 log1p log2
log_sigmoid_backward log_sigmoid_forward logaddexp logcumsumexp logsumexp masked_fill masked_scatter maximum mean
minimum mish mish_backward mm mse_loss mse_loss_backward mul mv native_batch_norm native_batch_norm_backward
native_dropout native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward neg nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
pixel_shuffle pixel_unshuffle pow.Tensor_Scalar rand_like randn_like reciprocal reflection_pad1d
reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward relu repeat replication_pad1d replication_pad2d
roll rsqrt rsub scatter scatter_add select_backward select_scatter selu sigmoid sigmoid_backward silu silu_backward
sin sinh slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward sqrt stack
std sub sum tanh tanh_backward trace tril triu unfold_backward unfold_copy upsample_bicubic2d
upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
upsample_nearest2d_backward var var_mean where xlogy
"""

_CONTINUOUS = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Ops without a jump, with or without an overload. Any other one may have one, gradients of kinks among them.

Poles and ends of where an op is defined are no jumps: there eager PyTorch computes infinite numbers as well.
"""

_OF_THIS_PACKAGE = frozenset(
    ("commfuse::bernoulli", "commfuse::convolution_weight_gradient", "commfuse::mask", "commfuse::put_rows_")
)


_aten = torch.ops.aten
_UNREAD = frozenset(
    (
        *SHAPE_ONLY,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
    )
)
"""Ops that do not read the numbers of their first argument."""


def numbers_read(node: fx.Node) -> list[fx.Node]:
    """The tensors of floating-point numbers whose numbers a node reads."""
    inputs = node.all_input_nodes[1:] if node.target in _UNREAD else node.all_input_nodes
    return [value for value in inputs if is_float(value)]


def may_jump(node: fx.Node) -> bool:
    """Whether the node's value may change much where a floating-point number that it reads changes little."""
    if node.op != "call_function" or is_view(node) or is_start(node) or is_wait(node) or not numbers_read(node):
        return False
    spec = info(node).spec
    if isinstance(spec, TensorSpec) and spec.dtype not in _FLOATS:
        return True  # numbers of places, truth values, and floats of 8 bits
    if node.kwargs.get("rounding_mode") is not None or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    name = node.target.name()
    known = {name, node.target._schema.name.removesuffix("_")}
    return known.isdisjoint(_CONTINUOUS) and name not in _OF_THIS_PACKAGE


def is_half(node: fx.Node) -> bool:
    """Whether it is a tensor of half precision."""
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.dtype in _HALF


def is_float(value: fx.Node) -> bool:
    """Whether it is a tensor of floating-point numbers, or several tensors."""
    spec = info(value).spec
    return isinstance(spec, tuple) or (isinstance(spec, TensorSpec) and spec.dtype.is_floating_point)
