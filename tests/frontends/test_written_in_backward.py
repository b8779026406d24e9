"""Buffers that the backward of a model writes: activation checkpointing runs a batch norm again there, and a hook of a
parameter may keep statistics of gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf


class Net(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.reentrant = reentrant
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.body, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(self.norm(h)) * self.seen.add(1)
        return out

    def keep_statistics(self) -> None:
        def note(grad: torch.Tensor) -> None:
            self.get_buffer("seen").mul_(0.5).add_(grad)

        self.head.bias.register_hook(note)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def once(call: Any, step: int) -> None:
    call(batch(step)).square().mean().backward()


def twice_forward(call: Any, step: int) -> None:
    first, second = call(batch(step)), call(batch(step + 10))
    (first - second).square().mean().backward()


def thrown_away(call: Any, step: int) -> None:
    call(batch(step + 20))
    once(call, step)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", [once, twice_forward, thrown_away])
def test_gradients_and_buffers_are_those_of_eager_pytorch(way: Any, reentrant: bool) -> None:
    model = Net(reentrant)
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, cpu_kernels=False)
    for net in (model, twin) if way is once else ():  # the others would change what an earlier forward has read
        net.keep_statistics()
    for step in range(3):
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad()
            way(call, step)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=1e-12, atol=1e-12)
    assert model.body[1].num_batches_tracked > model.norm.num_batches_tracked


def test_rank_0s_buffers_are_sent_behind_what_writes_them(tmp_path: Any) -> None:
    lowered = cf.compile(Net(), device_num=2).lower(batch(0))
    counts, floats = (each for each in lowered.collectives if each.kind == "broadcast")
    assert {"body.1.running_mean", "norm.running_mean"} <= {*counts.members, *floats.members}
    backward = lowered.text().partition("hand_over(")[2]
    written, sent = backward.index("copy_(%body.1.running_mean,"), backward.rindex("= _c10d_functional.broadcast")
    assert written < sent
    lowered.dump(tmp_path)
    assert cf.load(tmp_path).text() == lowered.text()
