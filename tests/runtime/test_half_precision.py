"""Numbers of half precision that decide something are those of eager PyTorch, though Inductor computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.ops.regions import regions_of
from tests.runtime.half_jumps import DTYPES, all_cases, is_rounded, jumps

OPS = [
    "abs",
    "clamp",
    "floor",
    "maximum",
    "nn.functional.hardtanh",
    "nn.functional.relu",
    "nn.functional.hinge_embedding_loss",
    "topk",
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_what_an_op_with_a_jump_reads_is_rounded(dtype: torch.dtype) -> None:
    """The list of ops that have none is wrong otherwise; `python -m tests.runtime.half_jumps` goes over all of them."""
    found = [case for case in all_cases(dtype, OPS, 2) if jumps(case)]
    assert {case.name.rpartition(" ")[0].replace("nn_functional_", "nn.functional.") for case in found} == {*OPS}
    assert not [case.name for case in found if not is_rounded(case)]


class Decides(nn.Module):
    """Rows of a table, and a weight, go by numbers that several ops have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(24, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        s = (x * 10.0 + 0.3) * self.weight
        loss = self.table((s * 2).to(torch.int64)).float().sum()
        for number, found in enumerate(DECISIONS):
            loss = loss + (self.weight * found(s - 0.3) * rows).float().sum() * (number + 1)
        return loss


DECISIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda s: s >= 7.0,
    lambda s: torch.isclose(s, torch.full_like(s, 3.0), rtol=1e-3),
    lambda s: F.threshold(s, 4.0, 0.0),
    lambda s: torch.remainder(s + 0.1, 1.0),
    lambda s: torch.ceil(s.float()),
    lambda s: torch.bucketize(s.detach(), torch.arange(1.0, 9.0).to(s.dtype)),
    lambda s: F.relu(s - 6.0),
    lambda s: torch.clamp(s, 2.0, 5.0),
    lambda s: torch.sign(s - 3.0),
    lambda s: F.margin_ranking_loss(s, s.detach() * 0 + 4.0, torch.ones_like(s), margin=1.0),
    lambda s: torch.lerp(s, s * 2, 0.3) >= 5.2,
    lambda s: F.softmax(s, 0) >= 0.1,
    lambda s: (s**3).floor(),
)

NUMBERS = torch.arange(1, 10) / 10


def gradients(
    call: Callable[..., torch.Tensor], model: nn.Module, *batch: torch.Tensor, form: str
) -> list[torch.Tensor]:
    loss = call(*batch)
    if form == "module":
        loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


@pytest.mark.parametrize(("dtype", "form"), [(torch.bfloat16, "step"), (torch.float16, "module")])
def test_as_in_eager_pytorch_other_rows_are_not_trained(dtype: torch.dtype, form: str) -> None:
    torch.manual_seed(0)
    model = Decides().to(dtype)
    twin = copy.deepcopy(model)
    batch = NUMBERS.to(dtype), torch.randn(9).to(dtype)
    regions = "layers" if form == "step" else "stretches"
    call = cf.compile(model, backend="inductor", form=form, inductor_regions=regions)
    have = gradients(call, model, *batch, form=form)
    want = gradients(twin, twin, *batch, form="module")
    torch.testing.assert_close(have, want, rtol=0.01, atol=0.01)
    assert torch.equal(have[1], want[1])
    assert not config.emulate_precision_casts


class Gate(nn.Module):
    """A linear layer under autocast, whose result decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(9, 1))
        nn.init.constant_(self.linear.weight, 10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.linear(x) * 0.1 * 10.0 - 0.5 + 0.5
        return (self.weight * (s.float() >= 7.0)).sum()


def test_under_autocast_too() -> None:
    model = Gate()
    twin = copy.deepcopy(model)
    step = cf.compile(model, backend="inductor", form="step")
    with torch.autocast("cpu", torch.bfloat16):
        twin(NUMBERS[:, None]).backward()
        step(NUMBERS[:, None])
    assert torch.equal(model.weight.grad, twin.weight.grad) and 0 < model.weight.grad.sum() < 9


def test_what_decides_nothing_is_not_rounded_in_between() -> None:
    """As that takes time: a transformer's layers have no op with a jump."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True).bfloat16()
    head = nn.Linear(8, 4).bfloat16()
    step = cf.compile(nn.Sequential(layer, nn.SiLU(), head), loss_fn=F.cross_entropy, backend="inductor", device_num=2)
    x, target = torch.randn(2, 4, 8).bfloat16(), torch.randint(4, (2, 4))
    regions = regions_of(step.lower(x, target).program)
    assert regions and not any(region.rounded for region in regions)


def test_what_a_module_hands_out_may_decide() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.SiLU()).bfloat16()
    compiled = cf.compile(model, backend="inductor", device_num=2)
    first, *backward = regions_of(compiled.lower(torch.randn(4, 8).bfloat16()).program)
    assert first.rounded and not any(region.rounded for region in backward)
