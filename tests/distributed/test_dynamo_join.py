"""Ranks with different numbers of batches, with Dynamo in front: as DistributedDataParallel, or an error on all.

What both forms of a module have in common is tested for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import Net, assert_buffers_are_equal, batch, sgd
from tests.distributed.models_that_break import Breaks, Reentrant, Routes
from tests.distributed.test_dynamo import Fails, pair, rows

pytestmark = pytest.mark.dist

OPTIMAL: dict[str, Any] = {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}, "cluster": "gloo-1gbit"}
OF_ACTIVE: dict[str, Any] = {"divide_by_initial_world_size": False}

Step = Callable[[Any, nn.Module, int], None]
"""One iteration: takes what wraps the model, the model and a number."""


def plain(call: Any, model: nn.Module, step: int) -> None:
    call(batch(step)).square().mean().backward()


def micro_batches(call: Any, model: nn.Module, step: int) -> None:
    with call.no_sync():
        call(batch(step + 20)).square().mean().backward()
    plain(call, model, step)


def sizes(call: Any, model: nn.Module, step: int) -> None:
    """Graphs for any size, on ranks that have come to them at other times."""
    call(batch(step, 3 + step * (1 + dist.get_rank()))).square().mean().backward()


def ways(call: Any, model: nn.Module, step: int) -> None:
    """Ranks go other ways, and one to a part that no rank has used before others have no more batches."""
    way = 2 if step == 2 else (step + dist.get_rank()) % 2
    call(rows(way)).square().mean().backward()


def branches(call: Any, model: nn.Module, step: int) -> None:
    call(rows(step)).square().mean().backward()


STEPS: dict[str, tuple[Callable[[], nn.Module], Step, dict[str, Any]]] = {
    "breaks": (Breaks, plain, {}),
    "reentrant": (Reentrant, plain, {}),
    "micro-batches": (Breaks, micro_batches, {}),
    "whole": (Net, micro_batches, {}),
    "sizes": (Breaks, sizes, {}),
    "ways": (Routes, ways, {"find_unused_parameters": True}),
    "ways by cost": (Routes, ways, {"find_unused_parameters": True, **OPTIMAL}),
}


def uneven(name: str, *epochs: tuple[list[int], dict[str, Any]]) -> None:
    make, iteration, given = STEPS[name]
    wrapped, model, other, twin = pair(make(), **given)
    optimizers = sgd(model), sgd(twin)
    for batches, options in epochs:
        for call, each, optimizer in zip((wrapped, other), (model, twin), optimizers, strict=True):
            torch.manual_seed(dist.get_rank())
            with call.join(**options):
                for step in range(batches[dist.get_rank()]):
                    # DistributedDataParallel takes what a rank without batches has used last for used.
                    optimizer.zero_grad(set_to_none=False)
                    iteration(call, each, step)
                    optimizer.step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-11, atol=1e-11)
        assert_buffers_are_equal(model)
    iteration(wrapped, model, 1)  # and on with it
    with wrapped.join(enable=False):
        iteration(wrapped, model, 1)


@pytest.mark.parametrize(
    ("name", "epochs"),
    [
        ("breaks", [([0, 2], OF_ACTIVE), ([3, 1], {})]),
        ("breaks", [([2, 0, 3], {})]),
        ("reentrant", [([1, 2], {})]),
        ("micro-batches", [([1, 3], OF_ACTIVE)]),
        ("whole", [([0, 2], {})]),
        ("sizes", [([4, 2], {})]),
        ("ways", [([1, 3], {})]),
        ("ways by cost", [([3, 1, 2], OF_ACTIVE)]),
    ],
    ids=str,
)
def test_ranks_with_different_numbers_of_batches(
    ranks: Ranks, name: str, epochs: list[tuple[list[int], dict[str, Any]]]
) -> None:
    ranks.values(uneven, name, *epochs, size=len(epochs[0][0]))


def summed(capture: str, given: dict[str, Any]) -> list[Any]:
    """Rank 0 has one batch. What comes of those of rank 1 alone, in ways that DistributedDataParallel does not have."""
    torch._dynamo.reset()
    model = Breaks() if capture == "dynamo" else Net()
    wrapped: Any = cf.compile(model, capture=capture, cpu_kernels=False, broadcast_buffers=False, **given)
    found = []
    with wrapped.join():
        for step in range(5 if dist.get_rank() else 1):
            model.zero_grad()
            torch.manual_seed(step)
            if step == 1:
                wrapped(batch(9))  # has no backward
            if step == 2:  # one backward through two forwards
                (wrapped(batch(2)) - wrapped(batch(3)).roll(1, 0)).square().mean().backward()
            elif step > 2:  # the forward runs again in the backward
                checkpoint(wrapped, batch(step).requires_grad_(), use_reentrant=step == 4).square().mean().backward()
            else:
                wrapped(batch(step)).square().mean().backward()
            torch.manual_seed(step)
            alone = [param for param in model.parameters() if param.requires_grad]
            if step == 1:
                model(batch(9))
            out = model(batch(2)) - model(batch(3)).roll(1, 0) if step == 2 else model(batch(step))
            expected = torch.autograd.grad(out.square().mean(), alone)
            for param, grad in zip(alone, expected, strict=True) if step else ():
                assert param.grad is not None
                found.append((step, param.grad.clone(), grad if given else grad / 2))
    wrapped(batch(7)).square().mean().backward()
    return found


@pytest.mark.parametrize("given", [{}, {"gradients_mean": False}], ids=["means", "sums"])
@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_forwards_that_differ_in_number_from_backwards(ranks: Ranks, capture: str, given: dict[str, Any]) -> None:
    nothing, found = ranks.values(summed, capture, given)
    assert not nothing and len(found) > 20
    for step, ours, expected in found:
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, msg=f"step {step}")


def by_cost(capture: str) -> None:
    """A rank that has never run the model answers graphs that are planned with prices of another rank."""
    torch._dynamo.reset()
    model = Routes() if capture == "dynamo" else Net()
    wrapped: Any = cf.compile(model, capture=capture, cpu_kernels=False, **OPTIMAL)
    with Join([wrapped]):
        for step in range(3 if dist.get_rank() else 0):
            with wrapped.no_sync():
                branches(wrapped, model, step)
            branches(wrapped, model, step)


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_plans_by_cost_where_a_rank_has_no_batch(ranks: Ranks, capture: str) -> None:
    ranks.values(by_cost, capture)


def behind_a_join(capture: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Backwards outside of a context, behind one in which rank 1 had more of them: ours, and what they should be."""
    torch._dynamo.reset()
    model = Breaks() if capture == "dynamo" else Net()
    wrapped: Any = cf.compile(model, capture=capture, cpu_kernels=False)
    found = []
    for _ in range(2):
        with wrapped.join():
            for step in range(1 + 2 * dist.get_rank()):
                plain(wrapped, model, step)
        for step in range(16):
            model.zero_grad()
            torch.manual_seed(step)
            plain(model, model, step)
            mean = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
            dist.all_reduce(mean)
            model.zero_grad()
            torch.manual_seed(step)
            plain(wrapped, model, step)
            ours = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
            found.append((ours, mean / dist.get_world_size()))
    return found


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_loops_behind_a_context(ranks: Ranks, capture: str) -> None:
    for found in ranks.values(behind_a_join, capture):
        for ours, expected in found:
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


class Bad(nn.Module):
    """A loss that cannot be computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a bad target")


def failing(places: list[str]) -> list[str]:
    """Rank 0 has no more batches when rank 1 of three fails. The ranks go on with the module after each error."""
    model = Fails()
    wrapped, *_ = pair(model)
    return [failing_at(where, wrapped, model) for where in places]


def failing_at(where: str, wrapped: Any, model: Fails) -> str:
    try:
        with wrapped.join():
            for step in range(3 if dist.get_rank() else 1):
                fails = step == 1 and dist.get_rank() == 1
                if fails and where == "before":
                    raise KeyError("a bad sample")
                model.fails = fails and where == "forward"
                out = wrapped(batch(step))
                model.fails = False
                loss = Bad()(out) if fails and where == "loss" else out.square().mean()
                loss.backward(retain_graph=where == "twice")
                if where == "twice" and step == 1:
                    loss.backward()
    except (KeyError, cf.CommFuseError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_fails_on_a_rank_is_named_on_all_ranks(ranks: Ranks) -> None:
    """A sample, a forward, a loss, and a second backward."""
    *errors, twice = zip(*ranks.values(failing, ["before", "forward", "loss", "twice"], size=3), strict=True)
    for (without, failed, other), what in zip(errors, ("sample", "sample", "target"), strict=True):
        assert failed == f"KeyError: 'a bad {what}'"
        for text in (without, other):
            assert text.startswith("PeerFailedError") and f"rank 1: KeyError: 'a bad {what}'" in text
    without, *others = twice
    assert without.startswith("PeerFailedError") and "rank 1: CommFuseError: rank 1 runs a second backward" in without
    for text in others:
        assert "second backward after one forward" in text


def other_ways() -> str:
    """Ranks that still have batches run other graphs, without find_unused_parameters."""
    wrapped, *_ = pair(Routes(), **OPTIMAL)
    try:
        with wrapped.join():
            for step in range(2 if dist.get_rank() else 1):
                wrapped(rows(dist.get_rank() if step else 0)).square().mean().backward()
    except cf.PlanMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_run_other_graphs_are_told(ranks: Ranks) -> None:
    for text in ranks.values(other_ways, size=3):
        assert text.startswith("ranks 1 and 2 use different parameters")


def early_end() -> str:
    wrapped, *_ = pair(Breaks())
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                plain(wrapped, wrapped.module, step)
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_raise_when_one_has_no_more_batches(ranks: Ranks) -> None:
    assert all("exhausted" in text for text in ranks.values(early_end))
