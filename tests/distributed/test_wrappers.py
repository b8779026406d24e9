"""What reduces gradients itself is found around a compiled module, and inside of it, at the first forward."""

from __future__ import annotations

from collections.abc import Callable

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


def shard(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def ddp_around() -> nn.Module:
    return nn.parallel.DistributedDataParallel(cf.compile(net()))


def ddp_far_around() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), cf.compile(net())))


def ddp_inside() -> nn.Module:
    model = net()
    compiled = cf.compile(model)
    model[0] = nn.parallel.DistributedDataParallel(model[0])
    return compiled


def fsdp_around() -> nn.Module:
    return shard(cf.compile(net()))


def fsdp_far_around() -> nn.Module:
    return shard(nn.Sequential(nn.Linear(6, 6), cf.compile(net())))


def fsdp_inside() -> nn.Module:
    model = net()
    compiled = cf.compile(model)
    shard(model[0])
    return compiled


def flat(module: nn.Module, **options: bool) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def flat_around() -> nn.Module:
    return flat(cf.compile(net()))


def flat_far_around() -> nn.Module:
    return flat(nn.Sequential(nn.Linear(6, 6), cf.compile(net())), use_orig_params=True)


def flat_around_dynamo() -> nn.Module:
    return flat(cf.compile(net(), capture="dynamo"))


def flat_inside() -> nn.Module:
    model = net()
    compiled = cf.compile(model)
    model[0] = flat(model[0])
    return compiled


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


def refused(number: int) -> None:
    make, text = list(CASES.items())[number]
    with pytest.raises(cf.ConfigValueError, match=text):
        make()(torch.randn(3, 6))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[make.__name__ for make in CASES])
def test_it_is_refused(ranks: Ranks, number: int) -> None:
    ranks.values(refused, number)
