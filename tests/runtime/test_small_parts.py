"""Small parts of the runtime that need no ranks: buckets of tensors, messages of failed ranks, generated sources."""

from __future__ import annotations

import gc
import linecache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from commfuse_fx.runtime.ranks import broadcast
from commfuse_fx.runtime.ranks.distress import Distress


def test_buckets_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 16)
    tensors = [torch.zeros(size) for size in (2, 2, 3, 5, 1)]
    assert [[len(each) for each in bucket] for bucket in broadcast.buckets(tensors)] == [[2, 2], [3], [5], [1]]
    assert list(broadcast.buckets([])) == []
    mixed = [torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(1)]
    assert [len(bucket) for bucket in broadcast.buckets(mixed)] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_the_first_message_of_a_rank_that_leaves_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: str, kind: str
) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(f"{tmp_path}/store", 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    distress = Distress("a world")
    distress.check()
    distress.call("rank 1: the cause")
    distress.call("rank 0: what followed")
    with pytest.raises(RuntimeError, match="left the step: rank 1: the cause"):
        distress.check()


def generated() -> list[str]:
    return [name for name in linecache.cache if name.startswith("<commfuse ")]


def test_generated_sources_are_dropped_with_their_step() -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    before = generated()
    step = cf.compile(nn.Linear(2, 1), loss_fn=nn.MSELoss())
    step(torch.ones(3, 2), torch.ones(3, 1))
    made = [name for name in generated() if name not in before]
    assert len(made) == 1
    del step
    gc.collect()
    assert made[0] not in generated()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_momentum_has_no_first_step(momentum: float) -> None:
    """Kernels of CUDA warn about a first step where there is no momentum."""
    model = nn.Linear(2, 1)
    step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), momentum=momentum))
    call = step.planner.take_apart((torch.ones(3, 2), torch.ones(3, 1)), {})
    executor = step.session.executor(step.session.plan(call), call)
    assert [each["is_first_step"] for each in executor.storage.numbers()] == [bool(momentum)]
