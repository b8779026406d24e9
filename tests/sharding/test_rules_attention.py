"""Every strategy of the rules for attention gives on parts what the op gives on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import Partial, Replicate, local_shape
from commfuse_fx.sharding.rules.prove import describe
from commfuse_fx.sharding.rules.writing.call import OpCall, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, fake_locals, made, proved


@WAYS
@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize("mask_shape", [None, (4, 8, 6, 6), (1, 1, 6, 6), (4, 1, 6, 6), (1, 8, 6, 6), (6, 6)])
def test_attention_on_cpu(ways: int, heads: int, mask_shape: tuple[int, ...] | None) -> None:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    query, key, value = made(4, 8, 6, 16), made(4, heads, 6, 16, seed=1), made(4, heads, 6, 16, seed=2)
    mask = None if mask_shape is None else made(*mask_shape)
    kwargs = {"attn_mask": mask, "scale": 0.3}
    args = [query, key, value, 0.0, mask is None]
    have = proved(forward, args, ways, kwargs)
    masks = [""] * 2
    if mask_shape is not None:
        masks = [", S(0)" if mask_shape[:-2] and mask_shape[0] == 4 else ", R"]
        masks.append(", S(1)" if mask_shape[:-2] and mask_shape[1] == 8 else ", R")
    assert have[1:] == [f"S({d}), S({d}), S({d}){masks[d]} -> S({d}), S({d})" for d in (0, 1)]
    out, logsumexp = forward(*args, **kwargs)
    args = [made(4, 8, 6, 16, seed=3), query, key, value, out, logsumexp, 0.0, mask is None]
    have = proved(backward, args, ways, kwargs)
    six = ", ".join(["S({0})"] * 6)
    assert have[1:] == [f"{six.format(d)}{masks[d]} -> S({d}), S({d}), S({d})" for d in (0, 1)]


@WAYS
def test_one_head_of_keys_for_all_queries(ways: int) -> None:
    query, key, value = made(4, 8, 6, 16), made(4, 1, 6, 16, seed=1), made(4, 1, 6, 16, seed=2)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert "S(1), R, R -> S(1), S(1)" in proved(forward, [query, key, value], ways)
    args = [made(4, 8, 6, 16, seed=3), query, key, value, *forward(query, key, value), 0.0, False]
    have = proved(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, ways)
    assert "S(1), S(1), R, R, S(1), S(1) -> S(1), P, P" in have


def test_heads_that_do_not_divide() -> None:
    args = [made(4, 8, 6, 16), made(4, 2, 6, 16), made(4, 2, 6, 16)]
    assert len(proved(aten._scaled_dot_product_flash_attention_for_cpu.default, args, 4)) == 2  # by batch only


def test_attention_with_dropout_is_not_divided() -> None:
    spec = TensorSpec((4, 8, 6, 16), torch.float32, (768, 96, 16, 1))
    query = key = value = torch.empty(spec.shape, device="meta")
    call, _ = call_of(aten._scaled_dot_product_flash_attention_for_cpu.default, [query, key, value])
    assert len(compute_strategies(call)) == 3
    dropping = OpCall(call.target, (*call.args[:3], 0.1), (), call.inputs, call.outputs, 2)
    assert len(compute_strategies(dropping)) == 1


def _check_shapes(target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> list[str]:
    """For kernels that need a GPU: every strategy's parts have the shapes that its placements promise."""
    call, tensors = call_of(target, args, kwargs, 2)
    for strategy in compute_strategies(call):
        results = fake_locals(call, strategy, tensors)
        for result, spec, placement in zip(results, call.outputs, strategy.outputs, strict=True):
            if spec is not None:
                assert tuple(result.shape) == local_shape(spec.shape, placement, 2), describe(strategy)
    return [describe(strategy) for strategy in compute_strategies(call)]


def _divided_outputs(have: list[str], d: int, count: int) -> bool:
    return any(each.split(" -> ")[1].split(", ")[:count] == [f"S({d})"] * count for each in have)


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_attention_on_cuda_by_shapes(kind: str) -> None:
    with FakeTensorMode():
        query = torch.empty(4, 8, 64, 32, device="cuda", dtype=torch.float16)
        bias = torch.empty(4, 8, 64, 64, device="cuda", dtype=torch.float16)
        if kind == "efficient":
            forward = aten._scaled_dot_product_efficient_attention.default
            made_ = forward(query, query, query, bias, True)
            have = _check_shapes(forward, [query, query, query, bias, True])
            backward = aten._scaled_dot_product_efficient_attention_backward.default
            args = [query, query, query, query, bias, *made_, 0.0, [True] * 4]
            grads = _check_shapes(backward, args)
            shared = torch.empty(1, 8, 64, 64, device="cuda", dtype=torch.float16)
            call, _ = call_of(backward, [*args[:4], shared, *args[5:]])
            spec = TensorSpec.of(shared)
            with_shared = OpCall(call.target, call.args, call.kwargs, call.inputs, (*call.outputs[:3], spec), 2)
            by_batch = compute_strategies(with_shared)[1]
            assert by_batch.inputs[4] == Replicate() and by_batch.outputs[3] == Partial()
        elif kind == "flash":
            forward = aten._scaled_dot_product_flash_attention.default
            out, logsumexp, _, _, m, n, state, offset, _ = forward(query, query, query)
            have = _check_shapes(forward, [query, query, query])
            backward = aten._scaled_dot_product_flash_attention_backward.default
            lengths = torch.empty(0, device="cuda", dtype=torch.int32)
            args = [query, query, query, query, out, logsumexp, lengths, lengths, m, n, 0.0, False, state, offset]
            grads = _check_shapes(backward, args)
        else:
            forward = aten._scaled_dot_product_cudnn_attention.default
            out, logsumexp, _, _, m, n, state, offset, _ = forward(query, query, query, bias, True)
            have = _check_shapes(forward, [query, query, query, bias, True])
            backward = aten._scaled_dot_product_cudnn_attention_backward.default
            lengths = torch.empty(0, device="cuda", dtype=torch.int32)
            args = [query] * 4 + [out, logsumexp, state, offset, bias, lengths, lengths, m, n, 0.0, False]
            grads = _check_shapes(backward, args)
    assert all(_divided_outputs(have, d, 2) and _divided_outputs(grads, d, 3) for d in (0, 1))
