"""Steps that try plans while they train: the same training, and one plan on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.planning.planner import Planner
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import xy
from tests.distributed.quick_trials import MOST_STEPS, quickly
from tests.distributed.step_twins import Twins
from tests.logs import logged
from tests.oracle import ACROSS_STEPS, OPTIMAL

pytestmark = pytest.mark.dist


def settles(winner: str, options: dict[str, Any] | None = None) -> tuple[list[str], int, str]:
    with quickly(winner, as_measured=not winner):
        twins = Twins(options)
        twins.settle()
        twins.check()
    assert twins.tried(rows=6) == twins.tried()
    lowered = twins.step.lower(*xy(0))
    return twins.tried(), twins.number, lowered.fingerprint


@pytest.mark.parametrize("winner", ["", "size 1", "across steps"])
def test_training_is_the_same_whatever_is_tried_and_stays(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(settles, winner)
    assert one == other
    tried, _, _ = one
    assert tried[0] == "default" and len(tried) > 2
    assert tried[-1].endswith(" stays") and (not winner or tried[-1] == f"{winner} stays")


@pytest.mark.parametrize(
    ("options", "winner"),
    [
        ({"comm_fusion": OPTIMAL}, "default"),
        (ACROSS_STEPS, "across steps"),
        ({"schedule": cf.ScheduleConfig(memory_limit=1 << 30)}, "planned"),
    ],
    ids=["optimal", "across steps", "limited"],
)
def test_what_is_asked_for_is_planned_with_measured_figures(ranks: Ranks, options: Any, winner: str) -> None:
    one, other = ranks.values(settles, winner, {**options, "cluster": "measured"})
    assert one == other
    tried, _, _ = one
    assert tried[0] == "default" and tried[-1] == f"{winner} stays"
    assert not any(each.startswith("size") for each in tried)


def with_other_things_between(what: str) -> list[str]:
    def between(twins: Twins) -> None:
        if what == "evaluation":
            for model, step in ((twins.model, twins.step), (twins.twin, twins.plain)):
                model.eval()
                step(*xy(0))
                model.train()
        elif what == "other sizes" and twins.number % 5 == 4:
            twins.run(rows=6)
        elif what == "other sizes on one rank" and dist.get_rank() == 1:
            twins.run(rows=4 + 2 * (twins.number % 2))
        elif what == "profile" and twins.number % 8 == 3:
            twins.step.profile(*xy(0), rounds=1)
        elif what == "new traces" and twins.number in (4, 9):
            twins.step.retrace()

    with quickly():
        twins = Twins()
        if what == "other sizes on one rank":
            while not twins.is_settled:
                assert twins.number < MOST_STEPS
                twins.run(rows=4 + 2 * (dist.get_rank() * (twins.number % 2)))
        else:
            twins.settle(between)
        twins.check()
    return twins.tried()


@pytest.mark.parametrize("what", ["evaluation", "other sizes", "other sizes on one rank", "profile", "new traces"])
def test_other_things_between_steps(ranks: Ranks, what: str) -> None:
    one, other = run_soon(ranks, with_other_things_between, what)
    assert one.value == other.value


def other_sizes_come(when: str) -> tuple[list[str], list[str], str]:
    """From some step on rank 1 has batches of two sizes: while plans are tried, or after one has stayed."""

    def rows() -> int:
        return 4 + 2 * (dist.get_rank() * (twins.number % 2))

    def others(twins: Twins) -> None:
        assert twins.step.session.replan is not None
        if twins.step.session.replan._turns is not None:
            twins.run(rows())

    with quickly("size 1"), logged() as messages:
        twins = Twins()
        twins.settle(others if when == "trials" else lambda twins: None)
        first = twins.tried()
        for number in range(MOST_STEPS):
            if twins.is_settled and number > 4:
                break
            twins.run(rows())
        twins.check()
        for _ in range(4):
            twins.run(rows())
    return first, twins.tried(), "\n".join(messages)


@pytest.mark.parametrize("when", ["trials", "end"])
def test_batches_of_other_sizes_come_to_one_rank(ranks: Ranks, when: str) -> None:
    one, other = ranks.values(other_sizes_come, when)
    assert one[:2] == other[:2] and one[1][-1] == "size 1 stays"


@contextmanager
def other_plans_by_size(until: int) -> Iterator[None]:
    """Plans follow from the size of the batch, for so many that are made."""
    planned_as, made = Planner.planned_as, iter(range(until))

    def otherwise(self: Planner, compiled: Any, config: Any, *args: Any) -> Any:
        if rows_of(compiled) == 6 and next(made, None) is not None:
            config = replace(config, comm_fusion=replace(config.comm_fusion, openstate=False))
        return planned_as(self, compiled, config, *args)

    with patch.object(Planner, "planned_as", otherwise):
        yield


def rows_of(compiled: Any) -> int:
    sources = compiled.captured.sources.items()
    return next(info(node).spec.shape[0] for node, source in sources if source.kind == "input")


def other_plans(until: int) -> tuple[list[str], str]:
    with quickly("size 1"), other_plans_by_size(until), logged() as messages:
        twins = Twins()
        twins.settle()
        for number in range(MOST_STEPS):
            twins.run(4 + 2 * (dist.get_rank() * (twins.number % 2)))
            if twins.is_settled and number > 4:
                break
        twins.check()
    return [each for each in messages if "sizes" in each], twins.tried()


@pytest.mark.parametrize(("until", "said"), [(1, 1), (10**6, 3)])
def test_ranks_whose_sizes_lead_to_other_plans_find_one_that_suits_all(ranks: Ranks, until: int, said: int) -> None:
    one, other = ranks.values(other_plans, until)
    assert len(one[0]) == len(other[0]) == said
    assert one[1] == other[1]


def memory_in_trials() -> tuple[int, int, int]:
    """Bytes of the flat tensors of the default plan, the most that there are at once, and how many are made in all."""
    made: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []

    def look(twins: Twins) -> None:
        pool = twins.step.session.runners.executors._pool
        for tensor in (*pool._flats.values(), *pool.held()):
            if all(ref() is not tensor for ref in made):
                made.append(weakref.ref(tensor))
        sizes.append(sum(tensor.nbytes for ref in made if (tensor := ref()) is not None))

    with quickly("size 1"):
        twins = Twins()
        twins.settle(look)
        for _ in range(3):
            twins.run()
            look(twins)
        twins.check()
    return sizes[0], max(sizes), len(made)


def test_memory_is_that_of_the_plan_that_runs(ranks: Ranks) -> None:
    """Not that of all plans that are tried, which each have flat parameters, states and gradients of their own."""
    for default, most, made in ranks.values(memory_in_trials):
        assert most < 1.1 * default and made > 20
