"""SyncBatchNorm on several ranks learns what BatchNorm learns from the whole batch on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld


def model(momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4, momentum=momentum, affine=affine), nn.BatchNorm1d(6, momentum=momentum)]
    made = nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), norms[1])
    return made.double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).square().mean()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}], ids=str)
def test_all_ranks_learn_as_one_device(settings: dict[str, Any], world: int) -> None:
    eager = model(**settings)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(eager))
    assert isinstance(synchronised[1], nn.SyncBatchNorm)
    optimizer = torch.optim.SGD(synchronised.parameters(), lr=0.1)
    ranks = LockstepWorld(cf.compile(synchronised, loss_fn=loss, optimizer=optimizer, device_num=world, global_rank=0))
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(8, 3, 6, 6).double(), torch.randn(8, 6).double()
        reference.zero_grad()
        want = loss(eager(x), y)
        want.backward()  # type: ignore[no-untyped-call]
        reference.step()
        results = ranks(list(zip(x.chunk(world), y.chunk(world), strict=True)))
        torch.testing.assert_close(torch.stack([result.loss for result in results]).mean(), want.detach())
    for each in ranks.models:
        torch.testing.assert_close(each.state_dict(), eager.state_dict(), rtol=1e-9, atol=1e-10)


def test_semi_auto_and_evaluation() -> None:
    """One device's graph: its batch is the whole one. An evaluation uses what has been kept."""
    eager = model()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(eager))
    x, y = torch.randn(8, 3, 6, 6).double(), torch.randn(8, 6).double()
    step = cf.compile(
        synchronised, loss_fn=loss, parallel_mode="semi_auto", device_num=2, global_rank=0, full_batch=True
    )
    want = loss(eager(x), y).detach()
    for result in LockstepWorld(step)([(x, y)] * 2):
        torch.testing.assert_close(result.loss, want)
    synchronised.eval()
    eager.eval()
    lowered = cf.compile(synchronised, loss_fn=loss, device_num=2, global_rank=0).lower(x, y)
    assert lowered.collectives == []


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": True}], ids=str
)
def test_ranks_in_eval_mode_use_what_they_have(settings: dict[str, Any]) -> None:
    """As in torch a rank may evaluate alone. Without running statistics those of its own batch count."""
    torch.manual_seed(0)
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, **{"track_running_stats": False, **settings}))
    net = nn.Sequential(nn.Linear(3, 3), norm).double().eval()
    batches = [(torch.randn(4, 3).double() * (rank + 1), torch.randn(4, 3).double()) for rank in range(2)]
    step = cf.compile(net, loss_fn=loss, device_num=2, global_rank=0)
    assert step.lower(*batches[0]).collectives == []
    for (x, y), result in zip(batches, LockstepWorld(step)(batches), strict=True):
        torch.testing.assert_close(result.loss, loss(net(x), y).detach())
    module = cf.compile(net, device_num=2, global_rank=0)
    assert {each.phase for each in module.lower(batches[0][0]).collectives} == {"backward"}
    norm.train()
    assert "forward" in {each.phase for each in module.lower(batches[0][0]).collectives}


def test_a_divided_graph_evaluates_the_whole_batch() -> None:
    """The marks of semi_auto change no result: it is that of one device, on which the batch is the whole one."""
    norm = nn.SyncBatchNorm(3, track_running_stats=False).double().eval()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 3).double()
    step = cf.compile(norm, loss_fn=loss, parallel_mode="semi_auto", device_num=2, global_rank=0)
    for result in LockstepWorld(step)(list(zip(x.chunk(2), y.chunk(2), strict=True))):
        torch.testing.assert_close(result.loss, loss(norm(x), y).detach())
