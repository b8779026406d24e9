"""Real ranks with broadcast_buffers=True against DistributedDataParallel with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import assert_parameters_close, compiled, convnet, momentum
from tests.oracle import ACROSS_STEPS

pytestmark = pytest.mark.dist

PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfused": {"comm_fusion": {"openstate": False}},
    "across steps": ACROSS_STEPS,
}


class Scaled(nn.Module):
    """A convnet whose loss depends on a running scale, not saved with the model, and on a fixed mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()
        self.net[4].eval()
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(out.abs().mean(0), alpha=0.1)
        scaled: torch.Tensor = out * self.scale * self.mask
        return scaled


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, 1, 8, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def disturb(model: nn.Module) -> None:
    with torch.no_grad():
        for buffer in model.buffers() if dist.get_rank() else ():
            buffer.copy_(torch.zeros_like(buffer) if buffer.dtype == torch.bool else buffer + 1)


def against_ddp(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    model, other = Scaled(), Scaled()
    wrapped = DistributedDataParallel(other)
    optimizer, others = momentum(model), momentum(other)
    step = compiled(model, optimizer, broadcast_buffers=True, **options)
    disturb(model)
    disturb(other)
    for number in range(4):
        loss = step(*batch(number))
        others.zero_grad()
        want = F.cross_entropy(wrapped(batch(number)[0]), batch(number)[1])
        want.backward()  # type: ignore[no-untyped-call]
        others.step()
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
        assert_parameters_close(model, other)
        if dist.get_rank() == 0 and number == 1:  # an evaluation of one rank sends nothing
            model.eval()
            step(*batch(9))
            model.train()
            model.net[4].eval()
    sent = [each for each in step.lower(*batch(0)).collectives if each.kind == "broadcast"]
    return {name: value.clone() for name, value in model.named_buffers()}, len(sent)


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_ddp_does(ranks: Ranks, plan: str) -> None:
    (first, sent), (second, _) = ranks.values(against_ddp, PLANS[plan])
    assert sent == (len(first) if plan == "unfused" else 3)  # floats, counts, the mask
    assert torch.equal(first["mask"], second["mask"])
    assert not torch.equal(first["net.1.running_mean"], second["net.1.running_mean"])


def gradients_against_ddp() -> None:
    model, other = Scaled(), Scaled()
    wrapped = DistributedDataParallel(other)
    step = compiled(model, broadcast_buffers=True)
    disturb(model)
    disturb(other)
    for number in range(2):
        step(*batch(number))
        F.cross_entropy(wrapped(batch(number)[0]), batch(number)[1]).backward()  # type: ignore[no-untyped-call]
        for have, want in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(have.grad, want.grad)
        torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


def test_gradients_are_those_of_ddp(ranks: Ranks) -> None:
    ranks.values(gradients_against_ddp)


def failing_step() -> tuple[bool, bool]:
    """A rank that fails before the first collective leaves all buffers as they are."""
    model = Scaled()
    step = compiled(model, momentum(model), broadcast_buffers=True)
    step(*batch(0))
    disturb(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    x, y = batch(1)
    with pytest.raises(RuntimeError if dist.get_rank() else cf.PeerFailedError):
        step(x[:, :, 0] if dist.get_rank() else x, y)
    same = all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    step(x, y)
    return same, bool((model.mask == torch.tensor([True, False, True, True])).all())


def test_a_step_that_fails_changes_no_buffer(ranks: Ranks) -> None:
    assert ranks.values(failing_step) == [(True, True)] * 2
