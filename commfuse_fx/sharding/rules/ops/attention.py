"""Scaled dot-product attention in one op: by batch and by heads.

Queries, keys and values are [batch, heads, length, features]. Keys and values may have fewer heads than the queries
(grouped queries): equal parts of both belong together, and a single head of them belongs to all queries. With dropout
only the replicated strategy is left, for the kernels draw their masks from the positions in the local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.placement import Placement, R, S
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.named import operand_placement, spec_of_argument, strategy, summand
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten

_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
_DIVIDED = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
_MASKS = ("attn_mask", "attn_bias")


def _placed(call: OpCall, dim: int) -> dict[str, Placement]:
    """Placements of the tensors that have the dimension; a mask may have it with size 1."""
    bound = call.bound()
    placed: dict[str, Placement] = {name: S(dim) for name in _DIVIDED if name in bound}
    query = spec_of_argument(call, "query")
    key = spec_of_argument(call, "key")
    assert query is not None and key is not None
    scores = (*query.shape[:3], key.shape[2])
    if dim == 1 and key.shape[1] == 1 < query.shape[1]:
        placed.update({"key": R, "value": R})
    for name in _MASKS:
        if name in bound:
            placed[name] = operand_placement(dim, spec_of_argument(call, name), scores)
    return placed


@rule(*_FORWARD)
def attention(call: OpCall) -> Sequence[Strategy]:
    """The output and the log-sum-exp are divided; what else comes out are seeds and lengths."""
    if call.bound()["dropout_p"] != 0 or call.bound().get("return_debug_mask"):
        return []
    outputs = call.outputs[2:]
    return [strategy(call, _placed(call, d), (S(d), S(d), *([R] * len(outputs)))) for d in (0, 1)]


@rule(*_BACKWARD)
def attention_backward(call: OpCall) -> Sequence[Strategy]:
    if call.bound()["dropout_p"] != 0:
        return []
    found: list[Strategy] = []
    for d in (0, 1):
        placed = _placed(call, d)
        masks = [summand(placed[name]) for name in _MASKS if name in placed]
        grads = [S(d), summand(placed["key"]), summand(placed["value"]), *masks][: len(call.outputs)]
        found.append(strategy(call, placed, grads))
    return found
