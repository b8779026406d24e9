"""A loop gives around a compiled module what it gives around DistributedDataParallel: the same bits, if sums agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import (
    LOOPS,
    Net,
    accumulation,
    assert_as_ddp,
    batch,
    clipping,
    grads,
    local_gradients,
    siamese,
    through_one_forward,
    two_losses,
)
from tests.distributed.models_of_modules import MODELS

pytestmark = pytest.mark.dist


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net() if name == "net" else MODELS[name]().double()


def compare(number: int, options: dict[str, Any], name: str = "net") -> int:
    loop = LOOPS[number]
    model = made(name)
    twin = copy.deepcopy(model)
    captures.share(model, name, any_mesh=True)
    wrapped = cf.compile(model, **options)
    other = nn.parallel.DistributedDataParallel(twin)
    torch.manual_seed(3 + dist.get_rank())
    state = torch.get_rng_state()
    ours = list(loop(wrapped, model))
    torch.set_rng_state(state)
    theirs = list(loop(other, twin))
    by_hand = loop in (
        siamese,
        through_one_forward,
    )  # what DistributedDataParallel cannot do is summed in another order
    exact = dist.get_world_size() <= 2 and not options.get("cpu_kernels", True) and not by_hand
    torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-10)
    return len(ours)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_gives_what_ddp_gives(ranks: Ranks, number: int, size: int) -> None:
    assert min(ranks.values(compare, number, {"cpu_kernels": False}, size=size))


OF_ALL = [accumulation, siamese, two_losses, local_gradients, clipping]


def all_of(name: str) -> None:
    """These loops one after the other, and what a float32 model gets."""
    for loop in OF_ALL:
        assert compare(LOOPS.index(loop), {"cpu_kernels": False}, name)
    found = []
    for wrap in (lambda net: cf.compile(net, cpu_kernels=False), nn.parallel.DistributedDataParallel):
        model = made(name).float()
        call = wrap(model)
        torch.manual_seed(3 + dist.get_rank())
        for step in range(2):
            call(batch(step, dtype=torch.float32)).square().mean().backward()
        found.append(grads(model))
    assert_as_ddp(*found)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_kinds(ranks: Ranks, name: str) -> None:
    ranks.values(all_of, name)
