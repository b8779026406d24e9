"""Modules that try plans for their backward: the same gradients, one plan on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, assert_same, snapshot, wide_mlp, xy
from tests.distributed.quick_trials import MOST_STEPS, quickly
from tests.oracle import OPTIMAL

pytestmark = pytest.mark.dist


class Loops:
    """A loop with a module that tries plans, and one with a module that does not."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model, self.twin = wide_mlp(), wide_mlp()
        self.optimizer, self.other = adamw(self.model), adamw(self.twin)
        self.module, self.plain = cf.compile(self.model, **options), cf.compile(self.twin)
        self.number = 0

    @property
    def replan(self) -> Any:
        return self.module._session.replan

    def run(self, rows: int = 4) -> None:
        for module, optimizer in ((self.module, self.optimizer), (self.plain, self.other)):
            optimizer.zero_grad()
            x, y = xy(self.number, rows=rows)
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
        self.number += 1
        for (name, one), other in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), f"step {self.number}, {name}"

    def settle(self, between: Callable[[Loops], None] = lambda loops: None) -> None:
        while not self.replan.is_settled:
            assert self.number < MOST_STEPS
            self.run()
            between(self)

    def tried(self) -> list[str]:
        notes = [each for each in self.module.lower(xy(0)[0]).explain().notes if each.topic == "plans tried"]
        return [f"{each.subject} stays" if each.reason == "stays" else each.subject for each in notes]


def settles(winner: str, options: dict[str, Any], between: str = "") -> tuple[list[str], list[int]]:
    def other_things(loops: Loops) -> None:
        if between == "no_sync":
            for module, optimizer in ((loops.module, loops.optimizer), (loops.plain, loops.other)):
                optimizer.zero_grad()
                with module.no_sync():
                    x, y = xy(loops.number, rows=4)
                    F.cross_entropy(module(x), y).backward()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
        elif between == "sizes":
            loops.run(4 + 2 * (dist.get_rank() * (loops.number % 2)))
        elif between == "two forwards":
            for module, optimizer in ((loops.module, loops.optimizer), (loops.plain, loops.other)):
                optimizer.zero_grad()
                x, _ = xy(loops.number, rows=4)
                (module(x) * module(x + 1)).sum().backward()
                optimizer.step()
        elif between == "new traces" and loops.number in (2, 4, 9, 20, 40):
            loops.module.retrace()
        elif between == "join" and loops.number % 8 == 1:
            for module, optimizer in ((loops.module, loops.optimizer), (loops.plain, loops.other)):
                with module.join():
                    for number in range(1 + dist.get_rank()):
                        optimizer.zero_grad()
                        x, y = xy(number)
                        F.cross_entropy(module(x), y).backward()
                        optimizer.step()

    with quickly(winner):
        loops = Loops(options)
        loops.settle(other_things)
        for _ in range(3):
            loops.run()
            other_things(loops)
        assert_same(snapshot(loops.model, loops.optimizer), snapshot(loops.twin, loops.other))
    return loops.tried(), [each.bytes for each in loops.module.lower(xy(0)[0]).collectives]


@pytest.mark.parametrize("winner", ["default", "size 1", "optimal"])
def test_gradients_are_the_same_whatever_stays(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(settles, winner, {"schedule": "auto"})
    assert one == other
    tried, sent = one
    assert tried[0] == "default" and tried[-1] == f"{winner} stays" and "across steps" not in tried
    assert len(sent) == 1 if winner == "default" else len(sent) > 1 or winner == "optimal"


@pytest.mark.parametrize("between", ["no_sync", "sizes", "two forwards", "new traces", "join"])
def test_what_else_loops_do(ranks: Ranks, between: str) -> None:
    one, other = ranks.values(settles, "size 1", {"schedule": "auto"}, between)
    assert one == other and one[0][-1] == "size 1 stays"


def test_what_is_asked_for_is_planned_with_measured_figures(ranks: Ranks) -> None:
    one, other = ranks.values(settles, "optimal", {"comm_fusion": OPTIMAL})
    assert one == other and one[0] == ["default", "optimal", "optimal stays"]
