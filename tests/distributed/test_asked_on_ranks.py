"""What libraries do with a wrapper on several ranks: reduce late, put another model in, save and load by names."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

DIVIDED = {"enable_parallel_optimizer": True}
ROWS = {"parallel_optimizer_threshold": 0, "pad": True}
WAYS: dict[str, dict[str, Any]] = {
    "trace": {},
    "dynamo": {"capture": "dynamo"},
    "unused": {"find_unused_parameters": True},
    "dynamo, unused": {"capture": "dynamo", "find_unused_parameters": True},
    "rows of gradients": {**DIVIDED, "parallel_optimizer_config": {"level": 2, **ROWS}},
    "rows of parameters": {**DIVIDED, "parallel_optimizer_config": {"level": 3, **ROWS}},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)


def reduces_late(way: str, by: str) -> list[str]:
    """Two rounds of three micro-batches under `no_sync`; the last backward reduces what all have left."""
    model, twin = net(), net()
    wrapped, other = cf.compile(model, cpu_kernels=False, **WAYS[way]), DistributedDataParallel(twin)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commfuse_fx").addHandler(handler)
    trigger = trigger_of_accelerate if by == "accelerate" else type(wrapped).sync_in_backward
    for step in range(2):
        for call in (wrapped, other):
            with call.no_sync():
                losses = [call(batch(step * 3 + number)).square().mean() for number in range(3)]
            losses[0].backward()
            (losses[1] * 0.5).backward()
            if call is wrapped:
                with trigger(wrapped):
                    losses[2].backward()
                assert wrapped.require_backward_grad_sync
            else:
                other.reducer.prepare_for_backward([])
                losses[2].backward()
        have, want = [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]
        torch.testing.assert_close([*have], [*want])
        wrapped.zero_grad()
        twin.zero_grad()
    return warnings


def trigger_of_accelerate(model: nn.Module) -> Any:
    from accelerate import Accelerator  # takes long to import

    return Accelerator.trigger_sync_in_backward(model)


@pytest.mark.parametrize(("way", "by"), [*((way, "") for way in WAYS), ("trace", "accelerate")])
def test_a_backward_reduces_what_ran_without(ranks: Ranks, way: str, by: str) -> None:
    assert ranks.values(reduces_late, way, by) == [[], []]


def not_in_a_join_context_of_ranks_without_batches() -> str:
    model = cf.compile(net())
    told = ""
    with model.join():
        for step in range(1 + dist.get_rank()):
            model(batch(step)).sum().backward()
            if step == 1:
                with pytest.raises(cf.NotAvailableError) as error, model.sync_in_backward():
                    pass
                told = str(error.value)
    return told


def test_ranks_without_batches_are_not_kept_waiting(ranks: Ranks) -> None:
    first, second = ranks.values(not_in_a_join_context_of_ranks_without_batches)
    assert not first and second.startswith("sync_in_backward() is not available in a join() context in which another")


def puts_another_in(way: str) -> None:
    wrapped = cf.compile(nn.Linear(6, 6).double(), cpu_kernels=False, **WAYS[way])
    wrapped(batch(0)).sum().backward()
    model = net()
    twin = copy.deepcopy(model)
    if dist.get_rank() == 1:
        nn.init.zeros_(model[0].weight)  # rank 0's values count
    wrapped.module = model
    other = DistributedDataParallel(twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    if way.startswith("rows"):
        optimizers[0] = cf.ShardedOptimizer(wrapped, torch.optim.SGD, lr=0.1)
    for step in range(3):
        for call, optimizer in zip((wrapped, other), optimizers, strict=True):
            call(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = wrapped.state_dict()  # buffers are sent in backwards here, and in forwards there
    torch.testing.assert_close(
        {name: state[name] for name, _ in twin.named_parameters()}, dict(twin.named_parameters())
    )


@pytest.mark.parametrize("way", ["trace", "dynamo", "rows of parameters"])
def test_a_model_that_is_assigned_is_reduced(ranks: Ranks, way: str) -> None:
    ranks.values(puts_another_in, way)


def saves_by_name(level: int, which: str, strict: bool) -> None:
    from torch.distributed.checkpoint import state_dict as saving  # takes long to import

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        options = {**DIVIDED, "parallel_optimizer_config": {"level": level, **ROWS}} if level > 1 else {}
        model = cf.compile(net(), cpu_kernels=False, **options)
        if level == 0:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = cf.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        goes_on(model, optimizer, range(steps))
        return model, optimizer

    def goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    def asked(model: nn.Module) -> nn.Module:
        return model if which == "compiled" else model.module

    options = saving.StateDictOptions(strict=strict)
    model, optimizer = trained(2)
    of_model, of_optimizer = copy.deepcopy(saving.get_state_dict(asked(model), optimizer, options=options))
    assert [*of_model] == [*net().state_dict()] and {*of_optimizer["state"]} <= {*of_model}
    for steps in (0, 1):  # an optimizer without a state of its own, and one with
        other, other_optimizer = trained(steps)
        if level > 1:
            other(batch(0))
        saving.set_state_dict(
            asked(other),
            other_optimizer,
            model_state_dict=copy.deepcopy(of_model),
            optim_state_dict=copy.deepcopy(of_optimizer),
            options=options,
        )
        goes_on(other, other_optimizer, range(2, 4))
        again, _ = trained(4)
        torch.testing.assert_close([*other.parameters()], [*again.parameters()])


def reads_into_a_state(level: int) -> None:
    """What torch.distributed.checkpoint.load does: it reads into the tensors of a state that it has asked for."""
    options = {**DIVIDED, "parallel_optimizer_config": {"level": level, **ROWS}}
    model = cf.compile(net(), cpu_kernels=False, **options)
    optimizer = cf.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).sum().backward()
    state = model.state_dict()
    optimizer.step()
    for value in state.values():
        value.fill_(3)
    model.load_state_dict(state)
    assert all((value == 3).all() for value in model.state_dict().values())


@pytest.mark.parametrize("level", [2, 3])
def test_what_is_read_into_a_state_is_loaded(ranks: Ranks, level: int) -> None:
    ranks.values(reads_into_a_state, level)


@pytest.mark.parametrize("which", ["compiled", "its model"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_torch_saves_and_loads_by_name(ranks: Ranks, level: int, which: str) -> None:
    ranks.values(saves_by_name, level, which, which == "compiled")
