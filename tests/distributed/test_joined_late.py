"""What is compiled before its process group is joined trains as what is compiled after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

LEVEL_3 = {"parallel_optimizer_threshold": 0, "pad": True, "level": 3}


class Branches(nn.Module):
    """Dynamo makes more than one graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if float(x.sum()) < 1e9 else x


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def batches(count: int = 3) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 4, generator=made) for _ in range(count)]


Trained = tuple[nn.Module, Callable[[], None]]


def step_form(**options: Any) -> Trained:
    model = net()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=sgd(model), **options)

    def train() -> None:
        for x in batches():
            step(x, x)
        assert step.steps == 3

    return model, train


def in_a_loop(compiled: Callable[..., torch.Tensor], optimizer: Any) -> None:
    for x in batches():
        optimizer.zero_grad()
        F.mse_loss(compiled(x), x).backward()
        optimizer.step()


def module_form(make: Callable[[], nn.Module] = net, **options: Any) -> Trained:
    """Ranks begin with different values, of which rank 0's are sent."""
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(int(os.environ["RANK"]))
    compiled = cf.compile(model, **options)
    return model, partial(in_a_loop, compiled, sgd(model))


def dynamo() -> Trained:
    torch.manual_seed(0)
    return module_form(Branches, capture="dynamo")


def backend() -> Trained:
    model = net()
    return model, partial(in_a_loop, torch.compile(model, backend="commfuse"), sgd(model))


def sharded(**options: Any) -> Trained:
    model = net()
    compiled = cf.compile(model, **options)
    optimizer = cf.ShardedOptimizer(compiled, torch.optim.SGD, lr=0.1, momentum=0.9)

    def train() -> None:
        in_a_loop(compiled, optimizer)
        assert len(optimizer.state_dict()["state"]) == 6

    return model, train


def read_first() -> Trained:
    """Its first use is a text, then an evaluation, then a meeting for a checkpoint."""
    model = net()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=sgd(model))

    def train() -> None:
        (x, *_) = batches()
        assert [each.kind for each in step.lower(x, x).collectives] == ["all_reduce"]
        with torch.no_grad():
            model.eval()
            step(x, x)
            model.train()
        folder = [tempfile.mkdtemp() if cf.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        step.save(Path(folder[0]) / "checkpoint")
        step(x, x)
        step.load(Path(folder[0]) / "checkpoint")
        for x in batches():
            step(x, x)

    return model, train


FORMS: dict[str, Callable[[], Trained]] = {
    "step": step_form,
    "rows": lambda: step_form(enable_parallel_optimizer=True, parallel_optimizer_config={**LEVEL_3, "level": 1}),
    "divided": lambda: step_form(parallel_mode="semi_auto"),
    "module": module_form,
    "level 3": lambda: sharded(enable_parallel_optimizer=True, parallel_optimizer_config=LEVEL_3),
    "sharded optimizer": sharded,
    "dynamo": dynamo,
    "backend": backend,
    "read first": read_first,
}


def trained(form: str, joined_late: bool) -> list[float]:
    torch._dynamo.reset()
    rank = cf.get_rank()
    if joined_late:
        dist.destroy_process_group()
        if rank == 0:  # what is dropped again leaves the order as it is
            cf.compile(nn.Linear(2, 2))
    model, train = FORMS[form]()
    if joined_late:
        cf.init()
    train()
    return [float(value.double().norm()) for value in model.state_dict().values()]


def trained_both_ways() -> dict[str, tuple[list[float], list[float]]]:
    return {form: (trained(form, True), trained(form, False)) for form in FORMS}


def test_all_forms_train_as_in_a_world_that_was_there(ranks: Ranks) -> None:
    first, second = ranks.values(trained_both_ways)
    for form in FORMS:
        late, early = first[form]
        assert late == early, form
        assert form in ("divided", "read first") or late[:2] == second[form][0][:2], form


def others() -> list[str]:
    """What a group that comes and goes leads to."""
    said: list[str] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
            said.append("fine")
        except cf.CommFuseError as error:
            said.append(f"{type(error).__name__}: {error}")

    (x, *_) = batches()
    model = net()
    steps = [cf.compile(model, loss_fn=F.mse_loss, optimizer=sgd(model)) for _ in range(2)]
    steps[0](x, x)
    dist.destroy_process_group()
    note(lambda: steps[0](x, x))  # the group is gone
    alone = cf.compile(model, loss_fn=F.mse_loss, optimizer=sgd(model), parallel_mode="stand_alone")
    note(lambda: alone(x, x))
    of_one = cf.compile(model, mesh=(1,), loss_fn=F.mse_loss, optimizer=sgd(model))
    note(lambda: of_one(x, x))
    note(lambda: cf.compile(model)(x))
    lowered = cf.compile(model, device_num=4, loss_fn=F.mse_loss, optimizer=sgd(model)).lower(x, x)
    assert lowered.collectives
    halves = cf.compile(net(), loss_fn=F.mse_loss, form="step")
    pair = [cf.compile(net(), loss_fn=F.mse_loss, form="step") for _ in range(2)]
    cf.init()
    note(lambda: steps[1](x, x))  # another group is there
    note(lambda: of_one(x, x))
    note(lambda: alone(x, x))
    note(lambda: halves(x, x))
    note(lambda: pair[cf.get_rank()](x, x))
    return said


def test_groups_that_come_and_go(ranks: Ranks) -> None:
    for said in ranks.values(others):
        gone, alone, of_one, unjoined, replaced, of_one_later, alone_later, halves, turns = said
        assert "process group for which this step was compiled has been destroyed" in gone
        assert "process group for which this step was compiled has been destroyed" in replaced
        assert (alone, alone_later, halves) == ("fine", "fine", "fine")
        for each in (of_one, unjoined):
            assert "torchrun has started 2 ranks (WORLD_SIZE=2)" in each and 'parallel_mode="stand_alone"' in each
        assert "mesh=(1,) has 1 device, but the world has 2 processes" in of_one_later
        assert turns.startswith("PlanMismatchError") and "rank 1: step" in turns and "different orders" in turns
