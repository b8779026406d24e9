"""What `plain_masks` makes of attention with a mask, and which masks it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.passes.rewrite.plain_masks import PlainMasks
from commfuse_fx.testing import assert_pass, parse_program
from tests.passes.cases import check

INF = torch.inf
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MASKED = (", attn_mask=%mask", ", 0.0, False, attn_mask=%mask")
CAUSAL = (", 0.0, True", ", 0.0, True")
PLAIN = ("", ", 0.0, False")

Arguments = tuple[str, str]


def attention(arguments: Arguments, before: str = "", queries: int = 4, keys: int = 4, dtype: str = "f32") -> str:
    """The text of one attention and its backward. before: the lines that make the mask.

    arguments: what stands behind the tensors in the call of the forward, and in that of the backward.
    """
    out, other = (TensorSpec((2, 2, n, 8), DTYPES[dtype], (16 * n, 8, 16, 1)) for n in (queries, keys))
    sums = TensorSpec((2, 2, queries), torch.float32, (2 * queries, 1, 2))
    return f"""
        in  %q: {out} = parameter
        in  %k: {other} = parameter
        in  %v: {other} = parameter
        {before}
        fwd %/attention.0: ({out}, {sums}) = aten._scaled_dot_product_flash_attention_for_cpu(%q, %k, %v{arguments[0]})
        fwd %/getitem.0: {out} = getitem(%/attention.0, 0)
        fwd %/getitem.1: {sums} = getitem(%/attention.0, 1)
        fwd %/sum.0: {dtype}[] = aten.sum(%/getitem.0)
        bwd %/ones_like.0: {out} = aten.ones_like(%/getitem.0)
        bwd %/grad.attention.0: ({out}, {other}, {other}) = aten._scaled_dot_product_flash_attention_for_cpu_backward(%/ones_like.0, %q, %k, %v, %/getitem.0, %/getitem.1{arguments[1]})
        bwd %/getitem.2: {out} = getitem(%/grad.attention.0, 0)
        bwd %/getitem.3: {other} = getitem(%/grad.attention.0, 1)
        bwd %/getitem.4: {other} = getitem(%/grad.attention.0, 2)
        return [%/sum.0, %/getitem.2, %/getitem.3, %/getitem.4]
    """


def triangle(queries: int = 4, keys: int = 4, dtype: str = "f32", hidden: float = -INF, diagonal: int = 1) -> str:
    """The lines that make a float mask: `hidden` on this diagonal and above it."""
    spec = f"{dtype}[{queries},{keys}]"
    return f"""
        fwd %full.0: {spec} = aten.full([{queries}, {keys}], {hidden}, dtype={dtype}, device=cpu, pin_memory=False)
        fwd %mask: {spec} = aten.triu(%full.0, {diagonal})
    """


def given(mask: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The lines that make a mask of these values, and the constants for them."""
    spec = str(TensorSpec.of(mask.contiguous()))
    lines = f"in  %constant: {spec} = constant\nfwd %mask: {spec} = aten.lift_fresh_copy(%constant)"
    return lines, {"constants": {"constant": mask.contiguous()}, "gradients": ["q", "k", "v"]}


def causal() -> torch.Tensor:
    return torch.full((4, 4), -INF).triu(1)


def test_a_mask_of_positions_becomes_a_flag_and_what_made_it_goes() -> None:
    before = """
        fwd %arange.0: i64[4] = aten.arange(4, device=cpu, pin_memory=False)
        fwd %unsqueeze.0: i64[4,1] = aten.unsqueeze(%arange.0, 1)
        fwd %le.0: b8[4,4] = aten.le.Tensor(%arange.0, %unsqueeze.0)
        fwd %expand.0: b8[2,1,4,4](0,16,4,1) = aten.expand(%le.0, [2, 1, 4, 4])
        fwd %scalar_tensor.0: f32[] = aten.scalar_tensor(-inf, dtype=f32, device=cpu)
        fwd %scalar_tensor.1: f32[] = aten.scalar_tensor(0.0, dtype=f32, device=cpu)
        fwd %mask: f32[2,1,4,4] = aten.where.self(%expand.0, %scalar_tensor.1, %scalar_tensor.0)
    """
    made = check(attention(MASKED, before), PlainMasks(), attention(CAUSAL))
    assert [(note.subject, note.reason) for note in made.notes] == [
        ("1 call", "it is causal, and kernels are told so instead")
    ]
    check(attention(CAUSAL), PlainMasks(), None)
    check(attention(MASKED, before), PlainMasks(at_most=32), None)  # the numbers of positions take 32 bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (5, 3), (1, 3), (40, 40)])
def test_causal_from_the_top_left_in_all_lengths(dtype: str, queries: int, keys: int) -> None:
    for hidden in (-INF, torch.finfo(DTYPES[dtype]).min):
        before = attention(MASKED, triangle(queries, keys, dtype, hidden), queries, keys, dtype)
        check(before, PlainMasks(), attention(CAUSAL, "", queries, keys, dtype))


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (1, 1), (1, 1, 4, 4), (2, 1, 1, 4), (2, 2, 4, 4)])
def test_a_mask_of_zeros_goes(shape: tuple[int, ...]) -> None:
    spec = f"f32[{','.join(map(str, shape))}]"
    zeros = f"fwd %mask: {spec} = aten.zeros({list(shape)}, device=cpu, pin_memory=False)"
    check(attention(MASKED, zeros), PlainMasks(), attention(PLAIN))


def test_what_is_causal_already_stays_so() -> None:
    both = (", 0.0, True, attn_mask=%mask", ", 0.0, True, attn_mask=%mask")
    zeros = "fwd %mask: f32[4,4] = aten.zeros([4, 4], device=cpu, pin_memory=False)"
    check(attention(both, zeros), PlainMasks(), attention(CAUSAL))
    check(attention(both, triangle()), PlainMasks(), attention(CAUSAL))


def test_masks_of_batch_and_heads_that_are_alike() -> None:
    lines = triangle().replace("%mask", "%triu.0")
    whole = "fwd %mask: f32[2,2,4,4] = aten.repeat(%triu.0, [2, 2, 1, 1])"
    check(attention(MASKED, f"{lines}\n{whole}"), PlainMasks(), attention(CAUSAL))
    expanded = "fwd %mask: f32[2,2,4,4](0,0,4,1) = aten.expand(%triu.0, [2, 2, 4, 4])"
    check(attention(MASKED, f"{lines}\n{expanded}"), PlainMasks(at_most=64), attention(CAUSAL))


def changed(*places: tuple[int, ...], value: float, shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    mask = causal().expand(shape).clone()
    for place in places:
        mask[place] = value
    return mask


ALMOST = {
    "one key too many": changed((0, 1), value=0),
    "one key too many at the far end": changed((0, 3), value=0),
    "one key less": changed((3, 0), value=-INF),
    "one key on the diagonal less": changed((2, 2), value=-INF),
    "a row that sees nothing": changed((0, 0), value=-INF),
    "one key weighted": changed((3, 1), value=1e-30),
    "not a number": changed((1, 0), value=torch.nan),
    "not a number where nothing is seen": changed((0, 1), value=torch.nan),
    "a large number": causal().clamp(-1e4),
    "almost the lowest number": causal().clamp(-3.4e38),
    "plus infinity": -causal(),
    "shifted up": torch.full((4, 4), -INF).triu(2),
    "shifted down": torch.full((4, 4), -INF).triu(0),
    "from the other end": causal().T,
    "a band": causal() + torch.full((4, 4), -INF).tril(-2),
    "one head differs": changed((0, 1, 3, 0), value=-INF, shape=(1, 2, 4, 4)),
    "one row of the batch is padded": changed((1, 0, 3, 3), value=-INF, shape=(2, 1, 4, 4)),
    "padding": torch.tensor([[0, 0, 0, -INF]]),
    "two numbers that hide": changed((0, 2), value=torch.finfo(torch.float32).min),
    "all hidden": torch.full((4, 4), -INF),
    "small numbers": torch.full((4, 4), 1e-30),
}


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_causal_or_almost_without_effect_stays(name: str) -> None:
    lines, options = given(ALMOST[name])
    check(attention(MASKED, lines), PlainMasks(), None, numerics="defines", **options)


def test_a_mask_that_a_step_may_change_stays() -> None:
    for source in ("buffer", "input", "parameter", "constant"):
        lines = f"in  %mask: f32[4,4] = {source}"
        options: dict[str, Any] = {"constants": {"mask": causal()}} if source == "constant" else {}
        check(attention(MASKED, lines), PlainMasks(), None, numerics="defines", gradients=["q", "k", "v"], **options)
    written = f"{triangle()}\nfwd %fill.0: f32[4,4] = aten.fill_.Scalar(%mask, 0.0)"
    check(attention(MASKED, written), PlainMasks(), None, numerics="defines")


def test_a_mask_that_cannot_be_computed_stays() -> None:
    zeros = "fwd %zeros.0: f32[4,4] = aten.zeros([4, 4], device=cpu, pin_memory=False)"
    fails = "fwd %mask: f32[4,4](1,4) = aten.linalg_cholesky(%zeros.0)"
    check(attention(MASKED, f"{zeros}\n{fails}"), PlainMasks(), None, numerics="defines")


def test_forward_and_backward_change_together_or_not_at_all() -> None:
    other = triangle(hidden=-1e4).replace("%full.0", "%full.1").replace("%mask", "%other")
    late, early = MASKED[1].replace("%mask", "%other"), MASKED[0].replace("%mask", "%other")
    check(attention((MASKED[0], late), triangle() + other), PlainMasks(), None, numerics="defines")
    check(attention((early, MASKED[1]), triangle() + other), PlainMasks(), None, numerics="defines")
    copied = attention(MASKED, triangle()).replace(
        "bwd %/ones_like.0", "bwd %out: SPEC = aten.clone(%/getitem.0)\nbwd %/ones_like.0"
    )
    spec = TensorSpec((2, 2, 4, 8), torch.float32, (64, 8, 16, 1))
    copied = copied.replace("SPEC", str(spec)).replace("%/getitem.0, %/getitem.1, 0.0", "%out, %/getitem.1, 0.0")
    check(copied, PlainMasks(), None, numerics="defines")


def on_cuda(kind: str, arguments: Arguments, before: str = "", keys: int = 4) -> str:
    """The text of one attention on a GPU, which is read and never run. kind: "efficient" or "cudnn"."""
    out, other = (TensorSpec((2, 2, n, 8), torch.float16, (16 * n, 8, 16, 1)) for n in (4, keys))
    forward = {
        "efficient": f"({out}, f32[2,2,32], i64[], i64[]) = aten._scaled_dot_product_efficient_attention",
        "cudnn": f"({out}, f32[2,2,4,1], -, ... 9) = aten._scaled_dot_product_cudnn_attention",
    }[kind]
    seeds = {"efficient": (2, 3), "cudnn": (6, 7)}[kind]
    sums = {"efficient": "f32[2,2,32]", "cudnn": "f32[2,2,4,1]"}[kind]
    tensors, saved = "%/ones_like.0, %q, %k, %v", ("%/getitem.0, %/getitem.1", "%/getitem.2, %/getitem.3")
    backward = {
        "efficient": f"({out}, {other}, {other}, -) = aten._scaled_dot_product_efficient_attention_backward({tensors}, "
        f"MASK, {saved[0]}, {saved[1]}, 0.0, {arguments[1]})",
        "cudnn": f"({out}, {other}, {other}) = aten._scaled_dot_product_cudnn_attention_backward({tensors}, {saved[0]}, "
        f"{saved[1]}, MASK, None, None, 4, {keys}, 0.0, {arguments[1]})",
    }[kind]
    return f"""
        in  %q: {out} = parameter
        in  %k: {other} = parameter
        in  %v: {other} = parameter
        {before}
        fwd %/attention.0: {forward}(%q, %k, %v, {arguments[0]})
        fwd %/getitem.0: {out} = getitem(%/attention.0, 0)
        fwd %/getitem.1: {sums} = getitem(%/attention.0, 1)
        fwd %/getitem.2: i64[] = getitem(%/attention.0, {seeds[0]})
        fwd %/getitem.3: i64[] = getitem(%/attention.0, {seeds[1]})
        fwd %/sum.0: f16[] = aten.sum(%/getitem.0)
        bwd %/ones_like.0: {out} = aten.ones_like(%/getitem.0)
        bwd %/grad.attention.0: {backward.replace("MASK", arguments[0].split(",")[0])}
        bwd %/getitem.4: {out} = getitem(%/grad.attention.0, 0)
        bwd %/getitem.5: {other} = getitem(%/grad.attention.0, 1)
        bwd %/getitem.6: {other} = getitem(%/grad.attention.0, 2)
        return [%/sum.0, %/getitem.4, %/getitem.5, %/getitem.6]
    """


BIAS = {"efficient": ("%mask, True", "[True, True, True, False]"), "cudnn": ("%mask, True", "False")}
FLAG = {
    "efficient": ("None, True, 0.0, True", "[True, True, True, False], True"),
    "cudnn": ("None, True, 0.0, True", "True"),
}
WITHOUT = {"efficient": ("None, True", "[True, True, True, False]"), "cudnn": ("None, True", "False")}


@pytest.mark.parametrize("kind", ["efficient", "cudnn"])
def test_kernels_of_gpus(kind: str) -> None:
    def seen(arguments: Arguments, before: str, after: str | None, keys: int = 4) -> None:
        program = parse_program(on_cuda(kind, arguments, before, keys), device="cuda", gradients=["q", "k", "v"])
        assert_pass(program, PlainMasks(), after)

    lines = triangle(dtype="f16").replace("=cpu", "=cuda")
    bools = "fwd %ones.0: b8[4,4] = aten.ones([4, 4], dtype=b8, device=cuda, pin_memory=False)"
    seen(BIAS[kind], lines, on_cuda(kind, FLAG[kind]))
    seen(BIAS[kind], f"{bools}\nfwd %mask: b8[4,4] = aten.tril(%ones.0)", on_cuda(kind, FLAG[kind]))
    seen(BIAS[kind], bools.replace("%ones.0", "%mask"), on_cuda(kind, WITHOUT[kind]))
    seen(BIAS[kind], f"{bools}\nfwd %mask: b8[4,4] = aten.triu(%ones.0)", None)
    # Scores of float16 can reach its lowest number.
    seen(BIAS[kind], triangle(dtype="f16", hidden=-65504.0).replace("=cpu", "=cuda"), None)
    longer = triangle(keys=6, dtype="f16").replace("=cpu", "=cuda")
    seen(BIAS[kind], longer, on_cuda(kind, FLAG[kind], keys=6) if kind == "efficient" else None, 6)
