"""Evaluations of real ranks that hold parts of parameters alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

ALONE = {"parallel_optimizer_threshold": 0, "pad": True, "level": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "by cost": {"cluster": "gloo-1gbit"},
    "across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"},
    "auto": {"schedule": "auto"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 26), nn.Tanh(), nn.Linear(26, 13))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(self.layers(x), x[:, 0].long().clamp(0, 12)), self.layers[2].weight


def pair(options: dict[str, Any]) -> list[cf.CompiledStep]:
    """A step whose ranks hold rows, and one of plain data parallel."""
    found = []
    for divided in ({"enable_parallel_optimizer": True, "parallel_optimizer_config": ALONE}, {}):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found.append(cf.compile(model, form="step", optimizer=optimizer, has_aux=True, **divided, **options))
    return found


def both(steps: list[cf.CompiledStep], training: bool, rows: int) -> float:
    """The largest difference of what a call of each step returns."""
    x = torch.randn(rows, 12, generator=torch.Generator().manual_seed(10 * rows + dist.get_rank()))
    (loss, weight), (other, whole) = [step.model.train(training) and step(x) for step in steps]
    assert weight.shape == whole.shape
    # In training, whole parameters have been updated by now, and what was gathered has not.
    return max((loss - other).abs().item(), 0.0 if training else (weight - whole).abs().max().item())


def held(step: cf.CompiledStep) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.untyped_storage().nbytes() for param in step.model.parameters())


def evaluates(name: str) -> tuple[float, int, list[str], int]:
    """Differences; bytes of whole parameters after an evaluation; what one sends; and what is sent of whole ones."""
    steps, x, worst = pair(VARIANTS[name]), torch.randn(4, 12), 0.0
    for training in (False, True, True, False, False, True, False):  # ranks evaluate batches of different sizes
        worst = max(worst, both(steps, training, 4 if training else 3 + dist.get_rank()))
    whole = held(steps[0])
    kinds = [each.kind for each in steps[0].lower(x).collectives]
    list(map(torch.clone, steps[0].model.parameters()))  # all ranks read them
    sent = len(steps[0].lower(x).collectives)
    if dist.get_rank() == 0:  # which one rank may now evaluate alone
        worst = max(worst, both(steps, False, 5))
    worst = max(worst, both(steps, True, 4), both(steps, False, 4))
    return worst, whole, kinds, sent


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_gathered_for_each_use(ranks: Ranks, name: str) -> None:
    for worst, whole, kinds, sent in ranks.values(evaluates, name):
        assert worst < 1e-5 and whole == sent == 0
        assert kinds and not any(kind != "all_gather" for kind in kinds)


def differs() -> str:
    step, _ = pair({})
    x = torch.randn(4, 12)
    step(x)
    step.model.train(dist.get_rank() == 1)
    try:
        step(x)
    except cf.CommFuseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_evaluates_while_another_trains_gets_an_error(ranks: Ranks) -> None:
    for said in ranks.values(differs):
        assert said.startswith("PlanMismatchError")
