"""Tensors of classes that do not let themselves be looked at, and SyncBatchNorm where torch's own runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.frontends.dynamo_module import _explain_sync_batch_norm


@pytest.fixture
def sharded() -> Iterator[torch.Tensor]:
    cf.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 4)
    dist.destroy_process_group()


def put(model: nn.Module, kind: str, tensor: Any) -> nn.Module:
    if kind == "parameter":
        model.weight = nn.Parameter(tensor)
    elif kind == "in place of one":
        model._parameters["weight"] = tensor
    else:
        model.register_buffer("table", tensor)
    return model


def step(model: nn.Module, **options: Any) -> Any:
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)


LEVEL_3 = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": 3}}
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "step": step,
    "virtual": lambda model: step(model, device_num=4),
    "divided": lambda model: step(model, parallel_mode="semi_auto"),
    "module": cf.compile,
    "dynamo": lambda model: cf.compile(model, capture="dynamo"),
    "level 3": lambda model: cf.compile(model, **LEVEL_3),
}


@pytest.mark.parametrize("kind", ["parameter", "in place of one", "buffer"])
def test_a_sharded_tensor_is_refused_by_name(sharded: torch.Tensor, kind: str) -> None:
    for compile_form in FORMS.values():
        model = put(nn.Linear(4, 4), kind, sharded)
        with pytest.raises(
            cf.CaptureError, match="(weight|table) is a ShardedTensor: only plain tensors can be compiled"
        ):
            compile_form(model)


def test_what_the_model_does_not_train_may_be_sharded(sharded: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    model.table = sharded
    cf.compile(model)(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


def test_the_error_of_torchs_own_sync_batch_norm_is_explained() -> None:
    model, error = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), ValueError("SyncBatchNorm expected a GPU")
    with pytest.raises(cf.CaptureError, match='1 is a SyncBatchNorm, and with capture="dynamo" torch\'s own runs'):
        _explain_sync_batch_norm(model, error)
    with pytest.raises(cf.CaptureError, match="^the top-level module is a SyncBatchNorm, and"):
        _explain_sync_batch_norm(nn.SyncBatchNorm(4), error)
    _explain_sync_batch_norm(model, ValueError("another"))
    _explain_sync_batch_norm(model.eval(), error)
    _explain_sync_batch_norm(nn.Linear(2, 2), error)
