"""What FSDP2 has saved with torch.distributed.checkpoint goes on as a compiled module, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

LEVEL_3 = {"level": 3, "parallel_optimizer_threshold": 0}


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def divided(seed: int, by: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh  # these take long to import
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = net(seed)
    if by == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    model = cf.compile(model, enable_parallel_optimizer=True, parallel_optimizer_config=LEVEL_3)
    return model, cf.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        optimizer.zero_grad()
        model(torch.randn(5, 6, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()
    whole: dict[str, Any] = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in whole.items()}


def goes_on(folder: str, saved_by: str, loaded_by: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = divided(0, saved_by)
    train(model, optimizer, range(2))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    unbroken = train(model, optimizer, range(2, 4))

    model, optimizer = divided(1, loaded_by)
    model(torch.zeros(5, 6, dtype=torch.float64))  # divides the parameters of a compiled module
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    torch.testing.assert_close(train(model, optimizer, range(2, 4)), unbroken)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("fsdp", "compiled"), ("compiled", "fsdp")])
def test_a_checkpoint_goes_on(ranks: Ranks, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    ranks.values(goes_on, str(tmp_path / "saved"), saved_by, loaded_by)
