"""Real ranks that hold parts of what their forward writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.oracle import tensors_of
from tests.sharding.writing_models import WRITES, Writes

pytestmark = pytest.mark.dist

NAMES = ("clip", "average", "copies")
MARKS: dict[str, tuple[Any, ...]] = {"up.weight": ("dp", None), "teacher.weight": (None, "dp")}


def sgd(model: Writes) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).double()


def trained(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank reads after two steps, and after one more in eval mode."""
    model = Writes(WRITES[name])
    for path, strategy in MARKS.items():
        cf.shard(model.get_parameter(path), strategy)
    step = cf.compile(model, optimizer=sgd(model), parallel_mode="semi_auto", mesh=(2,), full_batch=True)
    for number in range(2):
        step(batch(number))
    first = {key: value.clone() for key, value in model.state_dict().items()}
    model.eval()
    step(batch(2))
    return first, {key: value.detach().clone() for key, value in tensors_of(model).items()}


def test_they_are_written_as_one_device_writes_them(ranks: Ranks) -> None:
    for name, found in zip(NAMES, zip(*ranks.values(_all, size=2), strict=True), strict=True):
        model = Writes(WRITES[name])
        optimizer = sgd(model)
        for number in range(2):
            optimizer.zero_grad()
            model(batch(number)).backward()
            optimizer.step()
        first = {key: value.clone() for key, value in model.state_dict().items()}
        model.eval()(batch(2))
        for trained, evaluated in found:
            torch.testing.assert_close(trained, first, rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(evaluated, dict(model.state_dict()), rtol=1e-9, atol=1e-10)


def _all() -> list[Any]:
    return [trained(name) for name in NAMES]
