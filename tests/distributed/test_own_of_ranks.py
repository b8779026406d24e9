"""Parameters and buffers that each rank has its own of (`layerwise_parallel` in hybrid_parallel), of any shape."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import assert_same

pytestmark = pytest.mark.dist

OPTIONS: dict[str, dict[str, Any]] = {
    "module": {},
    "module, no broadcast": {"parameter_broadcast": False},
    "module, find_unused_parameters": {"find_unused_parameters": True},
    "module, past it": {},
    "module, apart": {"comm_fusion": {"openstate": False}},
    "dynamo": {"capture": "dynamo"},
    "step": {},
    "step, broadcast": {"parameter_broadcast": True, "broadcast_buffers": True},
}


class Expert(nn.Module):
    """Its width is the rank's own, and so are its values."""

    def __init__(self) -> None:
        super().__init__()
        width = 4 + dist.get_rank()
        self.into, self.out = nn.Linear(6, width), nn.Linear(width, 6)
        self.register_buffer("seen", torch.full((width,), float(dist.get_rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x)
        if self.training:
            self.seen += hidden.detach().square().mean(0)
        out: torch.Tensor = self.out(torch.tanh(hidden + 0.1 * self.seen))
        return out


def model(marked: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    torch.manual_seed(1 + dist.get_rank())
    made = nn.Sequential(shared[0], shared[1], Expert(), shared[2]).double()
    for each in (*made[2].parameters(), *made[2].buffers()):
        each.layerwise_parallel = marked  # behind double(), which makes buffers anew
    return made


def xy(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return (torch.randn(5, size, generator=made, dtype=torch.float64) for size in (6, 3))  # type: ignore[return-value]


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, sends_buffers: bool, penalty: bool) -> None:
    """Means over the ranks of the gradients that all have; rank 0's statistics ahead of each step."""
    shared = [each for name, each in net.named_parameters() if not name.startswith("2.")]
    for number in range(3):
        if sends_buffers:
            for name, buffer in net.named_buffers():
                if not name.startswith("2."):
                    dist.broadcast(buffer, 0)
        x, y = xy(number)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        (loss + net[2].out.weight.square().sum() if penalty else loss).backward()
        for param in shared:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()


def trained(form: str) -> None:
    net, other = model(), model(marked=False)
    before = copy.deepcopy(net[2].state_dict())
    optimizer, theirs = adamw(net), adamw(other)
    options = {"parallel_mode": "hybrid_parallel", **OPTIONS[form]}
    if form.startswith("step"):
        step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, **options)
    else:
        module = cf.compile(net, **options)
    assert_same(dict(net[2].state_dict()), dict(before))  # compiling has left them
    for number in range(3):
        x, y = xy(number)
        if form.startswith("step"):
            step(x, y)
        else:
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), y)
            (loss + net[2].out.weight.square().sum() if "past" in form else loss).backward()
            optimizer.step()
    by_hand(other, theirs, form != "step", "past" in form)
    for (name, mine), (_, want) in zip(net.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(
            mine, want, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{form}, {name}: {text}"
        )
    torch.testing.assert_close(net[2].seen, other[2].seen, rtol=0, atol=1e-12)
    if not form.startswith("step"):
        squares = [
            sum(each.grad.square().sum() for each in part.parameters()) for part in (other[:2], other[3:], other[2])
        ]
        dist.all_reduce(squares[2])
        torch.testing.assert_close(module.clip_grad_norm_(1e9), sum(squares).sqrt())  # type: ignore[union-attr]
    if form != "step":
        mean = net[1].running_mean.clone()
        dist.broadcast(mean, 0)
        if form != "step, broadcast":  # a module sends them in the backward
            assert torch.equal(mean, net[1].running_mean)


def all_forms() -> None:
    for form in OPTIONS:
        trained(form)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_trains_its_own_and_shares_the_rest(ranks: Ranks, size: int) -> None:
    ranks.values(all_forms if size == 2 else trained, *([] if size == 2 else ["module"]), size=size)


def goes_on_from_files() -> None:
    """Each rank has its own back, with the state of the optimizer."""
    net = model()
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=adamw(net), parallel_mode="hybrid_parallel")
    for number in range(2):
        step(*xy(number))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    step.save(Path(folder[0]) / "saved")
    kept = copy.deepcopy(step.state_dict())
    for number in range(2, 4):
        step(*xy(number))
    want = copy.deepcopy(step.state_dict())
    torch.manual_seed(7 + dist.get_rank())
    other = model()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    again = cf.compile(other, loss_fn=F.mse_loss, optimizer=adamw(other), parallel_mode="hybrid_parallel")
    for load in (lambda: again.load(Path(folder[0]) / "saved"), lambda: again.load_state_dict(kept)):
        load()
        for number in range(2, 4):
            again(*xy(number))
        assert_same(again.state_dict(), want)


def test_a_checkpoint_has_what_each_rank_has_of_its_own(ranks: Ranks) -> None:
    ranks.values(goes_on_from_files)


def of_other_names() -> str:
    """Rank 1 has not marked what rank 0 has."""
    with pytest.raises(cf.PlanMismatchError) as error:
        cf.compile(model(marked=dist.get_rank() == 0), parallel_mode="hybrid_parallel")
    return str(error.value)


def in_data_parallel() -> str:
    """The mark counts in hybrid_parallel alone."""
    with pytest.raises(cf.PlanMismatchError) as error:
        cf.compile(model())
    return str(error.value)


def test_ranks_that_differ_are_told(ranks: Ranks) -> None:
    for said in ranks.values(of_other_names):
        assert "2.into.weight: layerwise_parallel" in said
    for said in ranks.values(in_data_parallel):
        assert "2.into.weight: float64[5, 6]" in said


def joined() -> None:
    """Rank 1 has fewer batches. At the end it has rank 0's values, but for its own."""
    net = model()
    module = cf.compile(net, parallel_mode="hybrid_parallel")
    with module.join():
        for number in range(3 - dist.get_rank()):
            x, y = xy(number)
            F.mse_loss(module(x), y).backward()
    own = copy.deepcopy(net[2].state_dict())
    net.zero_grad()
    assert own["into.weight"].shape == (4 + dist.get_rank(), 6)
    norm = module.clip_grad_norm_(1.0)
    assert norm == 0


def test_a_join_context_leaves_what_is_of_each_rank(ranks: Ranks) -> None:
    ranks.values(joined)
