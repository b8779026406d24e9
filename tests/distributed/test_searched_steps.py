"""Steps whose strategies are searched, on real ranks: each is handed its own part of the batch, as in data parallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks, run_soon
from tests.sharding.test_search import SLOW_FLOPS, SLOW_MEMORY

pytestmark = pytest.mark.dist

CLUSTERS = {"slow flops": SLOW_FLOPS, "slow memory": SLOW_MEMORY}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).double()


def batches(ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4 * ranks, 16, generator=made).double(), torch.randn(4 * ranks, 8, generator=made).double())
        for _ in range(4)
    ]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(name: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    model = network()
    settings: dict[str, Any] = {"parallel_mode": "auto", "cluster": CLUSTERS[name], **options}
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer_of(model), **settings)
    rank, ranks = cf.get_rank(), cf.get_group_size()
    losses = [float(step(*(each.chunk(ranks)[rank] for each in batch))) for batch in batches(ranks)]
    assert step.session.running is not None
    params = step.session.running.program.params.values()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, [param.name for param in params if param.layout]


@pytest.mark.parametrize(("name", "divided"), [("slow flops", False), ("slow memory", True)])
@pytest.mark.parametrize("ranks_and_options", [(2, {}), (4, {"mesh": (2, 2)})], ids=str)
def test_equals_one_device(ranks: Ranks, name: str, divided: bool, ranks_and_options: Any) -> None:
    size, options = ranks_and_options
    model = network()
    optimizer, losses = optimizer_of(model), []
    for x, y in batches(size):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for have, state, laid_out in ranks.values(train, name, options, size=size):
        assert have == pytest.approx(losses, rel=1e-10) and bool(laid_out) == divided
        for key, value in copy.deepcopy(model).state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


def kept(folder: str, number: int) -> str:
    """All ranks load the file that rank 0 has saved, and have its graph."""
    file = f"{folder}/strategies.json"
    options = {"strategy_ckpt_load_file" if number else "strategy_ckpt_save_file": file}
    model = network()
    step = cf.compile(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer_of(model),
        parallel_mode="auto",
        cluster=SLOW_MEMORY,
        **options,
    )
    x, y = batches(1)[0]
    step(x, y)
    return step.lower(x, y).fingerprint


def test_a_file_of_strategies(ranks: Ranks, tmp_path: Any) -> None:
    first = ranks.values(kept, str(tmp_path), 0)
    assert first == ranks.values(kept, str(tmp_path), 1) and len(set(first)) == 1


def normed() -> list[dict[str, torch.Tensor]]:
    """What a rank holds after some steps: of data parallel, and with marks in the modes that divide a graph."""
    found = []
    for mode in ("data_parallel", "semi_auto", "auto"):
        model = nn.Sequential(network(), nn.BatchNorm1d(8).double())
        cf.shard(model[1], cross_batch=True)
        step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer_of(model), parallel_mode=mode)
        rank, ranks = cf.get_rank(), cf.get_group_size()
        for batch in batches(ranks):
            step(*(each.chunk(ranks)[rank] for each in batch))
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def test_norms_of_each_ranks_own_part(ranks: Ranks) -> None:
    states = ranks.values(normed)
    for wanted, *others in states:
        for name, value in wanted.items():
            for other in others:
                torch.testing.assert_close(other[name], value, rtol=1e-7, atol=1e-8)
    first, second = (of_rank[1]["1.running_mean"] for of_rank in states)
    assert not torch.equal(first, second)


def other_rows() -> None:
    model = network()
    step = cf.compile(
        model, loss_fn=nn.functional.mse_loss, optimizer=optimizer_of(model), parallel_mode="auto", cluster=SLOW_MEMORY
    )
    x, y = batches(1)[0]
    rows = 4 - 2 * cf.get_rank()
    step(x[:rows], y[:rows])


def test_ranks_with_other_numbers_of_rows(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, other_rows):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        assert "where a graph is divided" in outcome.error and "batches of the same size" in outcome.error
