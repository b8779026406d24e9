"""What reduces gradients itself is found around a compiled module, and inside of it, at the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))


used_before = False
"""Whether a module has run when it is wrapped."""


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    module = cf.compile(model, **options)
    if used_before:
        module(torch.randn(3, 6)).sum().backward()
    return module


def shard(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def ddp_around() -> nn.Module:
    return nn.parallel.DistributedDataParallel(compiled(net()))


def ddp_far_around() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), compiled(net())))


def ddp_inside() -> nn.Module:
    model = net()
    module = compiled(model)
    model[0] = nn.parallel.DistributedDataParallel(model[0])
    return module


def fsdp_around() -> nn.Module:
    return shard(compiled(net()))


def fsdp_far_around() -> nn.Module:
    return shard(nn.Sequential(nn.Linear(6, 6), compiled(net())))


def fsdp_inside() -> nn.Module:
    model = net()
    module = compiled(model)
    shard(model[0])
    return module


def flat(module: nn.Module, **options: bool) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def flat_around() -> nn.Module:
    return flat(compiled(net()))


def flat_far_around() -> nn.Module:
    return flat(nn.Sequential(nn.Linear(6, 6), compiled(net())), use_orig_params=True)


def flat_around_dynamo() -> nn.Module:
    return flat(compiled(net(), capture="dynamo"))


def flat_inside() -> nn.Module:
    model = net()
    module = compiled(model)
    model[0] = flat(model[0])
    return module


CASES: dict[Callable[[], nn.Module], str] = {
    ddp_around: "runs inside of DistributedDataParallel.*a second time: use what cf.compile",
    ddp_far_around: "runs inside of DistributedDataParallel",
    ddp_inside: "^0 of a compiled module is wrapped by DistributedDataParallel",
    fsdp_around: "runs inside of a FSDPCompiledModule, which fully_shard has made",
    fsdp_far_around: "runs inside of a FSDPSequential, which fully_shard has made",
    flat_around: "runs inside of FullyShardedDataParallel, which divides and reduces its 0.weight itself",
    flat_far_around: "runs inside of FullyShardedDataParallel",
    flat_around_dynamo: "runs inside of FullyShardedDataParallel",
    flat_inside: "parameter 0._fsdp_wrapped_module._flat_param of a compiled module is a Tensor of FSDP",
    fsdp_inside: "parameter 0.weight of a compiled module is a DTensor of FSDP",
}


def refused(number: int, later: bool) -> None:
    global used_before
    used_before = later
    make, text = list(CASES.items())[number]
    module = make()
    with pytest.raises(cf.ConfigValueError, match=text):
        module(torch.randn(3, 6))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[make.__name__ for make in CASES])
def test_it_is_refused(ranks: Ranks, number: int) -> None:
    ranks.values(refused, number, False)


@pytest.mark.parametrize("make", [ddp_around, ddp_far_around, ddp_inside, fsdp_around, fsdp_far_around, fsdp_inside])
def test_it_is_refused_around_a_module_that_has_run(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    ranks.values(refused, list(CASES).index(make), True)
