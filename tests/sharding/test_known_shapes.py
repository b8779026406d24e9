"""Ops whose shapes torch does not tell without data are divided as they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.sharding.dividing import localize
from commfuse_fx.sharding.dividing.localize import LocalSpecs
from tests.models import Batch, Case
from tests.sharding.divided_oracle import compare, divided, no_marks


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        log = self.layer(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, target, (6,) * rows, tuple(1 + row % 2 for row in range(rows)))


class Experts(nn.Module):
    """Sorted by expert, one grouped product, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(16, 2), nn.LayerNorm(16)
        self.weight = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        expert = (x[:, 0] > 0).long()
        order = expert.argsort(stable=True)
        ends = torch.stack([(expert == 0).sum(), (expert >= 0).sum()]).to(torch.int32)
        out = F.grouped_mm(x[order], self.weight, offs=ends)
        return (out * self.gate(x)[order].softmax(-1)[:, :1]).square().mean()


def ctc_batch(rows: int) -> Batch:
    return torch.randn(rows, 6, 6), torch.randint(1, 5, (rows, 2))


CTC = Case("ctc", Ctc, ctc_batch, None)
EXPERTS = Case("experts", Experts, lambda rows: (torch.randn(rows, 16),), None)


def mark(path: str) -> Any:
    return lambda model: cf.shard(model.get_parameter(path), ("tp", *[None] * (model.get_parameter(path).ndim - 1)))


@pytest.mark.parametrize("how", [no_marks, mark("layer.weight")], ids=["data", "mark"])
@pytest.mark.filterwarnings("ignore")
def test_ctc_loss(how: Any) -> None:
    mesh = (2,) if how is no_marks else (1, 2)
    compare(CTC, mesh, how, steps=2, gradients=False)


def test_grouped_products_in_single_precision() -> None:
    torch.manual_seed(0)
    model = EXPERTS.model(torch.float32)
    batch = EXPERTS.batches(1, dtype=torch.float32)[0]
    found = divided(EXPERTS, model, (1, 2), mark("norm.weight"), None)
    (loss, *_) = found.run(batch)
    wanted = model(*batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for name, param in found.world.models[1].named_parameters():
        torch.testing.assert_close(param.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_errors_of_torch_name_module_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    known = LocalSpecs._run

    def run(self: LocalSpecs, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._log_softmax.default:
            raise RuntimeError("no kernel\nmore lines")
        return known(self, target, args, kwargs)

    monkeypatch.setattr(LocalSpecs, "_run", run)
    monkeypatch.setattr(localize, "_remembered", {})
    with pytest.raises(cf.CaptureError, match="cannot divide the step at .*test_known_shapes.py:[0-9]+ over") as raised:
        divided(CTC, CTC.model(), (2,)).run(CTC.batches(1)[0])
    assert "[RuntimeError: no kernel]" in str(raised.value)
