"""What ranks hold of a module that they divide, measured: rows, and what is used at the moment."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.runtime.execute.wire import messages
from tests.distributed.harness import Ranks
from tests.distributed.test_divided_module import divided

pytestmark = pytest.mark.dist


def held_bytes() -> int:
    """Of all tensors that this process can reach; memory that several of them have counts once."""
    gc.collect()
    spans = []
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor) and type(each).__name__ != "FakeTensor" and each.device.type == "cpu":
                storage = each.untyped_storage()
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total, end = 0, 0
    for begin, stop in sorted(spans):
        total, end = total + max(stop - max(begin, end), 0), max(end, stop)
    return total


LAYERS, WIDTH = 6, 128
WEIGHT = WIDTH * WIDTH * 4


class Deep(nn.Module):
    """Equal weights without biases, and little else that takes memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def memory_of_steps(level: int) -> dict[str, float]:
    """In weights, beyond what was held before: at places of a step, and at most when a gather begins."""
    before = held_bytes()
    _, model = divided({"level": level}, Deep(), comm_fusion={"openstate": False})
    optimizer = cf.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    at: dict[str, list[float]] = {}

    def note(place: str) -> None:
        at.setdefault(place, []).append((held_bytes() - before) / WEIGHT)

    issue = messages.all_gather_single

    def gather(*args: Any, **kwargs: Any) -> Any:
        note("a gather")
        return issue(*args, **kwargs)

    for step in range(3):
        if step == 2:
            messages.all_gather_single = gather
            at.clear()
        loss = model(torch.ones(4, WIDTH))
        note("the forward")
        loss.backward()
        note("the backward")
        optimizer.step()
        note("the step")
        optimizer.zero_grad()
        del loss
        note("zero_grad")
        with torch.no_grad():
            model(torch.ones(4, WIDTH))
        note("an evaluation")
    messages.all_gather_single = issue
    return {place: max(found) for place, found in at.items()} | {"gathers": float(len(at["a gather"]))}


def is_dropped() -> dict[int, bool]:
    """At which levels a parameter is freed with its module and optimizer, while it has a gradient."""
    found = {}
    for level in (2, 3):
        net, model = divided({"level": level}, Deep())
        optimizer = cf.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        model(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        param = weakref.ref(net.layers[0].weight)
        del model, optimizer
        gc.collect()
        if level == 2:
            with pytest.raises(cf.CommFuseError, match="a compiled module that is gone.*keep what compile"):
                net.layers[0].weight.grad.sum()
        del net
        gc.collect()
        found[level] = param() is None
    return found


def test_a_module_that_is_dropped_lets_go_of_all(ranks: Ranks) -> None:
    assert ranks.values(is_dropped) == [{2: True, 3: True}] * 2


def test_a_rank_holds_rows_and_what_it_uses(ranks: Ranks) -> None:
    rows = LAYERS / 2
    for found in ranks.values(memory_of_steps, 3):
        slack = 2.5  # activations, scalars, and what a thread of Gloo lets go of a moment later
        assert found["the forward"] <= 3 * rows + slack, found
        assert found["the backward"] <= 4 * rows + slack, found
        assert found["the step"] <= 4 * rows + slack, found
        assert found["zero_grad"] <= 4 * rows + slack, found
        assert found["a gather"] <= 4 * rows + 3 + slack, found
        assert found["an evaluation"] <= 3 * rows + slack, found
        assert found["gathers"] == 3 * LAYERS - 1


def test_a_rank_holds_rows_of_gradients_alone_where_parameters_are_whole(ranks: Ranks) -> None:
    rows, slack = LAYERS / 2, 2.5
    for found in ranks.values(memory_of_steps, 2):
        assert found["the forward"] <= LAYERS + 2 * rows + slack, found
        assert found["the backward"] <= LAYERS + 3 * rows + slack, found
        assert found["gathers"] == LAYERS  # behind the update
