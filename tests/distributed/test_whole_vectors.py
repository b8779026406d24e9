"""Fused updates of flat storage: the bits that torch's fused optimizers give, however parameters are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import assert_same

pytestmark = pytest.mark.dist

STEPS = 12

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, t0=3),
}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"comm_fusion": {"openstate": False}},
    {"comm_fusion": {"allreduce": {"mode": "index", "config": [1, 3, 6]}}},
    {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "default"},
]


def model(dtype: torch.dtype) -> nn.Sequential:
    """No number of elements fills whole vectors, but those of one layer."""
    torch.manual_seed(0)
    widths = [19, 64, 64, 33, 7]
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths))).to(dtype)


def batch(number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    return torch.randn(16, 19, generator=generator, dtype=dtype), torch.randint(0, 7, (16,), generator=generator)


def in_every_layout(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The parameters after some steps: in eager PyTorch, and in each layout."""
    found = []
    eager = model(dtype)
    optimizer = OPTIMIZERS[name](eager.parameters())
    for number in range(STEPS):
        x, y = batch(number, dtype)
        optimizer.zero_grad()
        F.cross_entropy(eager(x), y).backward()
        for param in eager.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(2)
        optimizer.step()
    found.append(eager.state_dict())
    for layout in LAYOUTS:
        ours = model(dtype)
        captures.share(ours, model, any_mesh=True)
        optimizer = OPTIMIZERS[name](ours.parameters())
        step = cf.compile(ours, loss_fn=F.cross_entropy, optimizer=optimizer, cpu_kernels=False, **layout)
        for number in range(STEPS):
            step(*batch(number, dtype))
        step.synchronize()
        found.append({key: value.clone() for key, value in ours.state_dict().items()})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_all_layouts_train_to_the_bits_of_eager_pytorch(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    for eager, *ours in ranks.values(in_every_layout, name, dtype):
        for number, each in enumerate(ours):
            assert_same(each, dict(eager), f"layout {number}")
