"""Regions that are alike share the code that Inductor makes of them, and no others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.ops.regions import regions_of
from commfuse_fx.passes.kernels.inductor_regions import InductorRegions
from commfuse_fx.runtime.execute.inductor import inductor
from commfuse_fx.runtime.execute.inductor.inductor import compiled_regions
from commfuse_fx.testing import parse_program


def test_regions_that_are_alike_are_compiled_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters())
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, backend="inductor", device_num=2)
    program = step.lower(torch.randn(4, 8), torch.randn(4, 8)).program
    shown: list[str] = []

    @contextmanager
    def progress(text: str) -> Iterator[Callable[[str], None]]:
        shown.append(text)
        yield shown.append

    with (
        mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=lambda *args: lambda given: ()) as compiled,
        mock.patch.object(inductor, "progress", progress),
    ):
        found = compiled_regions(program, rank=0)
    assert len(found) == len(regions_of(program)) == 6 and compiled.call_count == 2
    assert shown == [f"compiling regions {done}/6 with Inductor" for done in (0, 1, 6)]


TWO_REGIONS = """
    in  %w: f32[2,3] = parameter
    in  %v: f32[] = parameter
    in  %u: f32[2,3] = parameter
    in  %x: f32[2,3] = input
    fwd %/mul.0: f32[2,3] = aten.mul.Tensor(%x, 2.0)
    fwd %/exp.0: f32[2,3] = aten.exp(%/mul.0)
    fwd %/sum.0: f32[] = aten.sum(%/exp.0)
    bwd %sent: f32[2,3] = _c10d_functional.all_reduce(%x, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=24 members=[w]}
    bwd %got: f32[2,3] = _c10d_functional.wait_tensor(%sent)
    bwd %/grad.mul.0: f32[2,3] = aten.mul.Tensor(%got, 2.0)
    bwd %/grad.exp.0: f32[2,3] = aten.exp(%/grad.mul.0)
    bwd %/grad.sum.0: f32[] = aten.sum(%/grad.exp.0)
    return [%/sum.0, %got, %/grad.sum.0]
"""


@pytest.mark.parametrize(
    ("old", "new", "compiles"),
    [
        ("", "", 1),
        ("got, 2.0)", "got, -2.0)", 2),
        ("got, 2.0)", "got, 2)", 2),
        ("aten.exp(%/grad.mul.0)", "aten.neg(%/grad.mul.0)", 2),
        ("aten.exp(%/grad.mul.0)", "aten.exp(%got)", 2),
        ("got, %/grad.sum.0]", "got, %/grad.sum.0, %/grad.exp.0]", 2),
        ("f32[2,3] = ", "f32[2,3](1,2) = ", 2),
    ],
    ids=["alike", "number", "kind of number", "op", "argument", "result", "strides"],
)
def test_regions_that_differ_in_anything_have_code_of_their_own(old: str, new: str, compiles: int) -> None:
    head, middle, tail = TWO_REGIONS.partition("    bwd %sent")
    gradients = ["w", "v", *(["u"] if "grad.exp.0]" in new else [])]
    program = parse_program(head + middle + tail.replace(old, new), gradients=gradients)
    assert InductorRegions()(program)
    with mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=lambda *args: lambda given: ()) as compiled:
        assert len(compiled_regions(program, rank=0)) == 2
    assert compiled.call_count == compiles


def test_regions_of_two_gpus_have_code_of_their_own() -> None:
    """Inductor writes the number of the device into it."""
    texts = []
    for device in ("cuda:0", "cuda:0", "cuda:1"):
        program = parse_program(TWO_REGIONS, device=device, gradients=["w", "v"])
        assert InductorRegions()(program)
        texts.append([inductor._text(region) for region in regions_of(program)])
    assert texts[0] == texts[1] != texts[2]


def test_with_regions_by_layer_more_layers_are_not_more_to_compile() -> None:
    compiled = []
    for count in (3, 6):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(count)]
        options = {"backend": "inductor", "inductor_regions": "layers", "device_num": 2}
        step = cf.compile(nn.Sequential(*layers), loss_fn=F.mse_loss, **options)
        program = step.lower(torch.randn(4, 8), torch.randn(4, 8)).program
        with mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=lambda *args: lambda given: ()) as code:
            assert len(compiled_regions(program, rank=0)) >= 2 * count
        compiled.append(code.call_count)
    assert compiled[0] == compiled[1]
