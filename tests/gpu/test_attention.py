"""Attention on CUDA gives with `is_causal=True` what it gives with a causal mask, and steps are given the flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import commfuse_fx as cf
from commfuse_fx.ir.core.bound_arguments import arguments_of

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def values(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, of two heads of 64 features."""
    made = torch.Generator("cuda").manual_seed(0)
    lengths = (queries, keys, keys, queries)
    return [torch.randn(2, n, 2, 64, generator=made, device="cuda").transpose(1, 2).to(dtype) for n in lengths]


def efficient(given: Sequence[torch.Tensor], mask: torch.Tensor | None, is_causal: bool) -> Sequence[torch.Tensor]:
    q, k, v, grad = given
    out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, is_causal)
    backward: Any = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return out, *backward(grad, q, k, v, mask, out, sums, seed, offset, 0.0, wanted, is_causal)[:3]


def by_cudnn(given: Sequence[torch.Tensor], mask: torch.Tensor | None, is_causal: bool) -> Sequence[torch.Tensor]:
    q, k, v, grad = given
    made = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, is_causal)
    out, sums, first, second, queries, keys, seed, offset = made[:8]
    backward: Any = aten._scaled_dot_product_cudnn_attention_backward
    saved = (out, sums, seed, offset, mask, first, second, queries, keys)
    return out, *backward(grad, q, k, v, *saved, 0.0, is_causal)


SINGLE, HALF = [torch.float32], [torch.bfloat16, torch.float16]  # cuDNN has no kernel in float32
SQUARE, OTHER = [(64, 64), (200, 200)], [(64, 128), (128, 64)]  # with cuDNN the pass leaves what is not square


@pytest.mark.parametrize(
    ("kernel", "dtype", "queries", "keys"),
    [
        *[(efficient, dtype, *lengths) for dtype in SINGLE + HALF for lengths in SQUARE + OTHER],
        *[(by_cudnn, dtype, *lengths) for dtype in HALF for lengths in SQUARE],
    ],
)
def test_the_flag_computes_what_the_mask_does(kernel: Any, dtype: torch.dtype, queries: int, keys: int) -> None:
    given = values(queries, keys, dtype)
    hidden = -torch.inf if dtype is torch.float16 else torch.finfo(dtype).min
    for number in (-torch.inf, hidden):
        mask = torch.full((queries, keys), number, dtype=dtype, device="cuda").triu(1)
        want = kernel(given, mask.expand(2, 2, queries, keys), False)
        have = kernel(given, None, True)
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        for one, other in zip(want, have, strict=True):
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * float(one.abs().max()))


class Attention(nn.Module):
    def __init__(self, is_windowed: bool) -> None:
        super().__init__()
        self.inner, self.is_windowed = nn.Linear(64, 192), is_windowed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, 2, 32).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = mask.triu(-2) if self.is_windowed else mask
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.float().square().mean()


@pytest.mark.parametrize("length", [40, 37])  # torch pads masks of odd lengths
@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_step_whose_model_makes_a_causal_mask(is_windowed: bool, length: int) -> None:
    model = Attention(is_windowed).cuda().to(torch.bfloat16)
    x = torch.randn(4, length, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        want = model(x)
        want.backward()
        wanted = [param.grad for param in model.parameters()]
        model.zero_grad()
        step = cf.compile(model, form="step")
        calls = [node for node in step.lower(x).program.graph.nodes if "efficient_attention" in str(node.target)]
        loss = step(x)
    assert len(calls) == 2
    assert all((arguments_of(node)["attn_bias"] is None) != is_windowed for node in calls)
    torch.testing.assert_close(loss, want.detach(), rtol=2e-2, atol=1e-3)
    for param, grad in zip(model.parameters(), wanted, strict=True):
        assert grad is not None
        torch.testing.assert_close(param.grad, grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()))
