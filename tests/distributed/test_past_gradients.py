"""Gradients that come past a compiled module are reduced at the end of the backward: DDP reduces them, too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import batch, grads
from tests.logs import logged

pytestmark = pytest.mark.dist


class Pairs(nn.Module):
    """The temperature of a contrastive loss is a parameter of the model that its forward may not read."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.reads = reads

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        found = self.one(x) @ self.other(x.flip(1)).T
        if self.reads:
            found = found * self.scale
        return found if given is None else found * given.sum()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, torch.arange(len(out)))


def read_by_the_loss(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of(call(x) * model.scale.exp())


def penalty(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each rank has another one."""
    return loss_of(call(x)) + model.one.weight.square().sum() * (1 + dist.get_rank())


def given_to_the_module(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of(call(x, model.other.weight))


def of_a_part(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of(call(x)) + model.one(x).square().mean()


def accumulated(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(call, cf.CompiledModule):
        with call.no_sync():
            read_by_the_loss(call, model, x + 1).backward()
    else:
        read_by_the_loss(call, model, x + 1).backward()
    return read_by_the_loss(call, model, x)


Loss = Callable[[Any, Any, torch.Tensor], torch.Tensor]
LOSSES: list[Loss] = [read_by_the_loss, penalty, given_to_the_module, of_a_part, accumulated]


def steps(call: Any, model: nn.Module, loss: Loss, total: bool, count: int) -> Iterator[list[torch.Tensor | None]]:
    for step in range(count):
        for _ in range(2 if step == 1 else 1):  # two backwards before an update
            loss(call, model, batch(step)).backward()
        if call is model:
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= 1 if total else dist.get_world_size()
        yield grads(model)
        model.zero_grad(set_to_none=step % 2 == 0)


def compare(number: int, reads: bool, options: dict[str, Any], count: int = 3) -> list[str]:
    model = Pairs(reads)
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, cpu_kernels=False, **options)
    total = not options.get("gradients_mean", True)
    with logged(logging.WARNING) as said:
        ours = list(steps(wrapped, model, LOSSES[number], total, count))
    theirs = list(steps(twin, twin, LOSSES[number], total, count))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return said


def compare_all(reads: bool) -> list[list[str]]:
    return [compare(number, reads, {}) for number in range(len(LOSSES))]


@pytest.mark.parametrize("reads", [False, True], ids=["not read", "read"])
def test_gradients_are_the_means_over_ranks(ranks: Ranks, reads: bool) -> None:
    for found in ranks.values(compare_all, reads):
        for said in found:
            assert len(said) == 1 and "is reduced at the end of the backward" in said[0]


def test_three_ranks(ranks: Ranks) -> None:
    ranks.values(compare, LOSSES.index(read_by_the_loss), False, {}, size=3)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"gradients_mean": False}], ids=str)
def test_with_options(ranks: Ranks, number: int, options: dict[str, Any]) -> None:
    ranks.values(compare, number, True, options)


@pytest.mark.parametrize("reads", [False, True])
def test_it_goes_on_when_not_every_parameter_is_looked_at(ranks: Ranks, reads: bool) -> None:
    ranks.values(compare, LOSSES.index(read_by_the_loss), reads, {}, 20)


def beginning_late(begins: int, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Backwards of which rank r gets a penalty from step `begins` on, and what was said and raised."""
    model, twin = Pairs(True), Pairs(True)
    wrapped = cf.compile(model, cpu_kernels=False, **options)
    raised = []
    with logged(logging.WARNING) as said:
        for step in range(22):
            loss = penalty if step >= begins else read_by_the_loss
            for call, each in ((wrapped, model), (twin, twin)):
                each.zero_grad()
                try:
                    loss(call, each, batch(step)).backward()
                except cf.CommFuseError as error:
                    raised.append(f"{step} {error}")
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert other.grad is not None
                dist.all_reduce(other.grad)
                wanted = other.grad if options else other.grad / dist.get_world_size()
                if not (raised and step == begins):
                    torch.testing.assert_close(param.grad, wanted, rtol=1e-12, atol=1e-12)
    return said, raised


@pytest.mark.parametrize("size", [2, 3])
def test_a_penalty_that_begins_late_is_reduced(ranks: Ranks, size: int) -> None:
    for said, raised in ranks.values(beginning_late, 18, {}, size=size):
        (text,) = [text for text in said if "one.weight got a gradient" in text]
        assert not raised and "is reduced at the end of the backward" in text


def test_a_late_penalty_on_a_sum_is_an_error_once(ranks: Ranks) -> None:
    for _, raised in ranks.values(beginning_late, 18, {"gradients_mean": False}):
        (text,) = raised
        assert text.startswith("18 ") and "call zero_grad() and run the step again" in text


def replaced() -> None:
    """Other parameters under the same names."""
    model = Pairs()
    wrapped = cf.compile(model, cpu_kernels=False)
    for step in range(3):
        twin = copy.deepcopy(model)
        read_by_the_loss(wrapped, model, batch(step)).backward()
        read_by_the_loss(twin, twin, batch(step)).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert other.grad is not None
            dist.all_reduce(other.grad)
            torch.testing.assert_close(param.grad, other.grad / dist.get_world_size(), rtol=1e-12, atol=1e-12)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def test_parameters_that_are_replaced(ranks: Ranks) -> None:
    ranks.values(replaced)


class Heads(nn.Module):
    """A task has a head of its own."""

    task = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 6).double(), nn.ModuleList([nn.Linear(6, 2).double() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.heads[self.task](self.body(x))
        return out


def tasks(capture: str) -> None:
    """What a backward has reached that does not reduce, is reduced by the next one that does."""
    model = Heads()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, cpu_kernels=False, capture=capture)
    for step in range(2):
        model.task = twin.task = 0
        with wrapped.no_sync():
            wrapped(batch(step)).square().mean().backward()
        twin(batch(step)).square().mean().backward()
        model.task = twin.task = 1
        wrapped(batch(step + 5)).square().mean().backward()
        twin(batch(step + 5)).square().mean().backward()
        for param in twin.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        torch.testing.assert_close(grads(model), grads(twin), rtol=1e-12, atol=1e-12)
        model.zero_grad()
        twin.zero_grad()


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_what_was_reached_without_reducing(ranks: Ranks, capture: str) -> None:
    ranks.values(tasks, capture)


def on_one_rank() -> str:
    model = Pairs()
    wrapped = cf.compile(model)
    out = wrapped(batch(0))
    with pytest.raises(cf.PlanMismatchError) as error:
        loss_of(out * model.scale if dist.get_rank() else out).backward()
    model.zero_grad()
    loss_of(wrapped(batch(0))).backward()
    return str(error.value)


def test_ranks_that_differ_in_it_are_told(ranks: Ranks) -> None:
    for text in ranks.values(on_one_rank):
        assert "scale" in text and "rank 0 has no gradient of scale" in text


def uneven(options: dict[str, Any]) -> list[torch.Tensor]:
    model = Pairs()
    wrapped = cf.compile(model, cpu_kernels=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twin = copy.deepcopy(model)
    with wrapped.join(**options):
        for step in range(1 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            read_by_the_loss(wrapped, model, batch(step)).backward()
            optimizer.step()
    for step in range(3):
        twin.zero_grad()
        active = step < 1 + 2 * dist.get_rank()
        if active:
            read_by_the_loss(twin, twin, batch(step)).backward()
        count = 2 if step == 0 or not options else 1
        for param in twin.parameters():
            grad = param.grad if active and param.grad is not None else torch.zeros_like(param)
            dist.all_reduce(grad)
            with torch.no_grad():
                param -= 0.1 * grad / count
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-12, atol=1e-12)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=str)
def test_ranks_with_different_numbers_of_batches(ranks: Ranks, options: dict[str, Any]) -> None:
    first, second = ranks.values(uneven, options)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def updated_in_hooks() -> list[str]:
    """A hook that sees the gradient before the end of the backward cannot see the mean."""
    model = Pairs()
    wrapped = cf.compile(model)
    model.scale.register_post_accumulate_grad_hook(lambda param: None)
    with logged(logging.WARNING) as said:
        read_by_the_loss(wrapped, model, batch(0)).backward()
    return said


def test_hooks_that_come_too_early_are_warned_of(ranks: Ranks) -> None:
    for said in ranks.values(updated_in_hooks):
        assert len(said) == 1 and "register_post_accumulate_grad_hook" in said[0] and "scale" in said[0]
