"""Updates that ranks share, of parameters that are used in unusual ways: training is that of plain data parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld

RANKS, STEPS = 3, 4
ACROSS = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"}
ACCUMULATED = {"accumulate_steps": 2}
SHARED: dict[str, dict[str, Any]] = {
    "rows": {"pad": True},
    "rows that divide": {},
    "rows alone": {"pad": True, "level": 3},
    "owners": {"mode": "broadcast"},
}


class Strange(nn.Module):
    """Each of its parameters is one that a pass could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.viewed = nn.Parameter(torch.randn(12, 12))  # in parts, turned, and twice
        self.written = nn.Parameter(torch.randn(13, 12))  # the forward clamps it
        self.written_evenly = nn.Parameter(torch.randn(12, 12))
        self.in_loss = nn.Parameter(torch.randn(5, 3))  # by nothing but the loss function
        self.unused = nn.Parameter(torch.randn(7, 3))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.no_columns = nn.Parameter(torch.randn(6, 0))
        self.one = nn.Parameter(torch.randn(1))
        self.turned = nn.Parameter(torch.randn(6, 12).t())  # not contiguous
        self.strided = nn.Parameter(torch.randn(24, 6)[::2])  # nor without gaps
        self.hooked = nn.Parameter(torch.randn(12, 1))
        self.hooked.register_hook(lambda grad: 2 * grad + 0.01)
        self.seen = nn.Parameter(torch.randn(12))
        self.register_buffer("view_of_seen", self.seen.data[:3])
        self.register_buffer("average", torch.zeros(12, 12))
        self.norm = nn.BatchNorm1d(12)
        self.double()
        self.shares = nn.Parameter(self.seen.data[6:])
        self.view_of_seen = self.seen.data[:3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.written.clamp_(-0.5, 0.5)
            self.written_evenly.data.mul_(0.9)
        self.average.mul_(0.9).add_(self.viewed.detach(), alpha=0.1)
        upper, lower = self.viewed.chunk(2)
        hidden = torch.tanh(x @ self.viewed.t() + self.norm(x) @ torch.cat([lower, upper]))
        hidden = torch.tanh(hidden @ self.viewed.view(6, 24).reshape(12, 12) + self.viewed.diagonal() + self.seen)
        wide = (hidden @ self.written.t()).tanh().sum(1) + (hidden @ self.written_evenly).tanh().sum(1)
        narrow = (hidden @ self.turned + hidden @ self.strided).tanh().sum(1) + (hidden @ self.hooked).squeeze(1)
        shared = self.shares.sum() + self.view_of_seen.sum() + self.average.mean()
        return (wide + narrow) * self.one + shared + self.empty.sum() + self.no_columns.sum()


def trained(config: dict[str, Any] | None, **options: Any) -> LockstepWorld:
    model = Strange()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if config is not None:
        options |= {"enable_parallel_optimizer": True}
        options |= {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0, **config}}

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y) + model.in_loss.pow(2).sum()

    step = cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, device_num=RANKS, global_rank=0, **options)
    world, made = LockstepWorld(step), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x, y = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in ((RANKS * 4, 12), (RANKS * 4,)))
        world(list(zip(x.chunk(RANKS), y.chunk(RANKS), strict=True)))
    return world


def tensors(world: LockstepWorld, rank: int) -> dict[str, torch.Tensor]:
    """All that a rank's model and optimizer hold."""
    model, optimizer = world.models[rank], world.optimizers[rank]
    assert optimizer is not None
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[number]}/{name}": value.clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, {}), (ACROSS, {}), (ACCUMULATED, {}), (ACCUMULATED, {"gradient_accumulation_shard": True})],
    ids=["", "across steps", "accumulated", "accumulated in rows"],
)
def test_every_tensor_is_that_of_plain_data_parallel(options: dict[str, Any], more: dict[str, Any]) -> None:
    plain = trained(None, **options)
    for name, config in SHARED.items():
        world = trained({**config, **more}, **options)
        for rank in range(RANKS):
            found, want = tensors(world, rank), tensors(plain, rank)
            assert sorted(found) == sorted(want)
            for key, value in want.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


def test_parameters_that_the_model_writes_stay_whole() -> None:
    world = trained({"pad": True, "level": 3})
    x = torch.randn(4, 12, dtype=torch.float64)
    explanation = world.step.lower(x, x[:, 0]).explain()
    said = {note.subject: note.reason for note in explanation.notes if note.topic == "sharded updates"}
    whole = "; it stays whole between steps, as the model itself writes to it"
    assert [name for name, reason in said.items() if whole in reason] == ["written", "written_evenly"]
    shards = world._ranks[0].shards
    assert shards is not None
    alone = {each.name: each.is_divided for each in shards._divided}
    assert not alone["written"] and not alone["written_evenly"] and alone["viewed"] and alone["norm.weight"]
