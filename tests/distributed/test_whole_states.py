"""What `state_dict()` gives of a step and of its optimizer where ranks divide states: whole tensors for one rank to
save."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.errors import CollectiveError
from tests.distributed.harness import Ranks, hurry
from tests.distributed.models_of_ranks import assert_same
from tests.distributed.test_parallel_optimizer import SMALL, batch, model
from tests.sharding.elementwise import ONE_AXIS, make_step
from tests.sharding.elementwise import batch as batch_of_parts

pytestmark = pytest.mark.dist

OWNED = {"mode": "broadcast", "pad": False}
KINDS: dict[str, dict[str, Any]] = {
    "level 1": {"level": 1},
    "level 2": {"level": 2},
    "level 3": {"level": 3},
    "broadcast": OWNED,
    "broadcast, level 2": {**OWNED, "level": 2},
    "across steps": {"level": 2},
}
ACROSS: dict[str, Any] = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"}


def divided(kind: str) -> Any:
    net = model()
    return cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=adamw(net), enable_parallel_optimizer=True,
        parallel_optimizer_config={**SMALL, **KINDS[kind]}, **(ACROSS if kind == "across steps" else {}),
    )  # fmt: skip


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def on_one_device(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the batches of all ranks."""
    for number in steps:
        batches: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(batches, batch(number))
        xs, ys = zip(*batches, strict=True)
        optimizer.zero_grad()
        F.cross_entropy(net(torch.cat(xs)), torch.cat(ys)).backward()
        optimizer.step()


def assert_close(have: dict[str, Any], want: dict[str, Any]) -> None:
    assert have.keys() == want.keys() and have["param_groups"] == want["param_groups"]
    torch.testing.assert_close(have["state"], want["state"], rtol=0, atol=1e-12)


def saved_on_rank_0(kind: str) -> None:
    """All ask, rank 0 saves, and one device goes on from it."""
    step, (net, alone) = divided(kind), (made := model(), adamw(made))
    for number in range(2):
        step(*batch(number))
    on_one_device(net, alone, range(2))
    for ask in (step.state_dict, lambda: {"optimizer": step.optimizer.state_dict()}):
        state = ask()
        if dist.get_rank() == 0:  # what no other rank has any part in
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            assert_same(torch.load(file)["optimizer"], copy.deepcopy(state["optimizer"]))
        dist.barrier()
        step(*batch(2))  # which divides them again
        on_one_device(net, alone, range(2, 3))
    packed = step.optimizer.state_dict()
    assert_close(packed, alone.state_dict())
    net.load_state_dict(step.model.state_dict())
    alone.load_state_dict(packed)
    on_one_device(net, alone, range(3, 5))
    for number in range(3, 5):
        step(*batch(number))
    assert_close(step.optimizer.state_dict(), alone.state_dict())


def asked_in_other_ways(kind: str) -> None:
    """Copies, pickles and torch.distributed.checkpoint; what saves parts leaves them divided."""
    step = divided(kind)
    optimizer, shards = step.optimizer, step.session.runners.executors.shards
    packed = optimizer.state_dict()
    assert shards is None and not packed["state"]  # nothing is divided yet, and no rank waits for another one
    step(*batch(0))
    shards = step.session.runners.executors.shards
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    step.save(Path(folder[0]) / "rows")
    step.load(Path(folder[0]) / "rows")
    assert shards.is_divided
    want = copy.deepcopy(optimizer.state_dict())
    step.load_state_dict(copy.deepcopy(step.state_dict()))
    for ask in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        step(*batch(1))
        step.load(Path(folder[0]) / "rows")
        assert shards.is_divided
        other = ask(optimizer)
        assert not shards.is_divided
        if dist.get_rank() == 0:  # a copy is this rank's alone
            assert_same(other.state_dict(), want)
    step(*batch(1))
    step.load(Path(folder[0]) / "rows")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for each in (StateDictOptions(), options):
        named = get_optimizer_state_dict(step.model, optimizer, options=each)
        held = named["state"] if dist.get_rank() == 0 else {}
        for number, name in enumerate(held):
            assert_same(dict(held[name]), want["state"][number])
    dist.barrier()


def asked_alone(kind: str, what: str) -> tuple[str, float]:
    step = divided(kind)
    step(*batch(0))
    hurry(6.0)
    said, began = "", time.monotonic()
    if dist.get_rank() == 1:
        try:
            (step if what == "step" else step.optimizer).state_dict()
        except CollectiveError as error:
            said = str(error)
    waited = time.monotonic() - began
    step(*batch(1))
    states = step.optimizer.state_dict()["state"]
    with torch._C.DisableTorchFunctionSubclass():
        assert all(value.untyped_storage().nbytes() for state in states.values() for value in state.values())
    return said, waited


def parts_of_the_model() -> None:
    """Where the model itself is divided, its optimizer's states are as well."""
    step = make_step(ONE_AXIS, (1, 2), "adamw", virtual=False)
    step(batch_of_parts(0, 0))
    state = step.optimizer.state_dict()["state"]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(state, file)
        assert all(value.isfinite().all() for held in state.values() for value in held.values())
    dist.barrier()
    step(batch_of_parts(1, 0))


def all_kinds() -> None:
    for kind in KINDS:
        saved_on_rank_0(kind)
        asked_in_other_ways(kind)
    parts_of_the_model()


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_saves_what_all_have_asked_for(ranks: Ranks, size: int) -> None:
    ranks.values(all_kinds if size == 2 else saved_on_rank_0, *([] if size == 2 else ["broadcast"]), size=size)


@pytest.mark.parametrize("kind, what", [("level 1", "optimizer"), ("broadcast", "optimizer"), ("level 2", "step")])
def test_a_rank_that_asks_alone_is_told_that_all_have_to(ranks: Ranks, kind: str, what: str) -> None:
    (nothing, _), (said, waited) = ranks.values(asked_alone, kind, what)
    assert not nothing and waited < 6.0
    assert "call model.state_dict(), optimizer.state_dict() and step.state_dict() on every rank" in said
