"""How often a loop around a compiled module communicates, and where its gradients lie afterwards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import Net, batch

pytestmark = pytest.mark.dist


def one(call: Any) -> None:
    call(batch(0)).square().mean().backward()


def several_forwards(call: Any) -> None:
    (call(batch(0)) - call(batch(1)) * call(batch(2))).square().mean().backward()


def two_losses(call: Any) -> None:
    one(call)
    one(call)


def forward_thrown_away(call: Any) -> None:
    call(batch(1))
    one(call)


def not_all_in_the_loss(call: Any) -> None:
    """Of three calls the backward reaches the first two."""
    first, second, _ = call(batch(0)), call(batch(1)), call(batch(2))
    (first - second).square().mean().backward()


def micro_batches(call: Any) -> None:
    with call.no_sync():
        one(call)
        one(call)
    one(call)


def nothing_but_forwards(call: Any) -> None:
    call(batch(0))
    call.eval()
    with torch.no_grad():
        call(batch(1))
    call.train()


def local_gradients(call: Any) -> None:
    torch.autograd.grad(call(batch(0)).sum(), [next(call.parameters())])


WAYS: dict[Callable[[Any], None], int] = {
    one: 1,
    several_forwards: 1,
    two_losses: 2,
    forward_thrown_away: 1,
    not_all_in_the_loss: 1,
    micro_batches: 1,
    nothing_but_forwards: 0,
    local_gradients: 0,
}
"""How many backwards of each way reduce."""


def counts() -> list[tuple[int, int]]:
    """All_reduces and broadcasts of each way, of a small model: its gradients fit into one bucket, its buffers of two
    dtypes into two."""
    call, found = cf.compile(Net(), cpu_kernels=False), []
    for _ in range(16):  # the first backwards look for gradients that come past the module
        one(call)
    for way in WAYS:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            way(call)
        names = [event.name for event in profile.function_events]
        found.append((names.count("c10d::allreduce_"), names.count("c10d::broadcast_")))
    return found


def test_of_the_calls_that_a_backward_reaches_one_sends(ranks: Ranks) -> None:
    for found in ranks.values(counts):
        assert found == [(backwards, 2 * backwards) for backwards in WAYS.values()]


def flat_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).double()
    compiled = cf.compile(model)
    for _ in range(2):
        compiled(torch.full((2, 16), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
        places = sorted((param.grad.data_ptr(), param.grad.nbytes) for param in model.parameters())
        assert all(place + size == after for (place, size), (after, _) in pairwise(places))
        compiled.zero_grad()


def test_gradients_are_parts_of_one_bucket(ranks: Ranks) -> None:
    ranks.values(flat_gradients)
