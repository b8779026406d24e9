"""Where a step offers its only core to the backend's threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.cost.turns import LONGEST_TURN, TURN, turn_seconds
from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import execution_order
from commfuse_fx.measure.calibration import calibrate
from commfuse_fx.passes.schedule.give_way import turns
from commfuse_fx.runtime.execute.wire import socket_threads
from tests.distributed.harness import Ranks
from tests.models import randomised

LAYERS, ROWS, WIDTH = 6, 64, 512  # 0.7 ms of a nominal core for each product


def made(device_num: int | None = None, across_steps: bool = False) -> cf.CompiledStep:
    torch.manual_seed(0)
    model = randomised(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    return cf.compile(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        device_num=device_num,
        comm_fusion={"openstate": False},
        cluster="gloo-1gbit" if across_steps else None,
        schedule=cf.ScheduleConfig(across_steps=across_steps),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def program(device_num: int, across_steps: bool = False) -> Program:
    return made(device_num, across_steps).lower(*batch()).program


def in_flight(order: list[torch.fx.Node], place: int) -> bool:
    """Whether something is on the wire there, found by playing two rounds of steps."""
    flying: set[str] = set()
    for number, node in enumerate([*order, *order]):
        if number == len(order) + place:
            return bool(flying)
        flying |= {start.name for start, _ in info(node).sends}
        if info(node).collective is not None:
            flying.add(node.name)
        if is_wait(node):
            flying.discard(node.args[0].name)
    raise AssertionError


@pytest.mark.parametrize("across_steps", [False, True])
def test_only_while_something_is_in_flight_and_not_more_often_than_pays(across_steps: bool) -> None:
    step = program(2, across_steps)
    order = execution_order(step)
    found = [order.index(node) for node in turns(step)]
    assert found == sorted(found)
    assert all(in_flight(order, place) for place in found)
    products = [i for i, node in enumerate(order) if "mm" in str(node.target)]
    for one, other in pairwise(found):
        between = sum(one <= i < other for i in products)
        assert between >= 1, "a turn per node would cost more than it brings"
        assert between <= (6 if across_steps else 3), "no turn for milliseconds"  # the first on a slow network
    forward_ends = max(i for i in products if info(order[i]).phase == "forward")
    beside_forward = any(i < forward_ends for i in found)
    assert beside_forward == across_steps, "only there collectives of the step before are in flight"


def test_a_slow_network_needs_fewer_turns() -> None:
    assert turn_seconds(1.2e8) == pytest.approx(200_000 / 1.2e8)
    assert turn_seconds(1e9) == TURN
    assert turn_seconds(1e6) == LONGEST_TURN


def test_without_collectives_nobody_waits_for_the_core() -> None:
    assert turns(program(1)) == []


def yields(run: Callable[[], object], cores: int) -> int:
    """How often `run` gives way where this process has so many cores."""
    count = [0]

    def counted() -> None:
        count[0] += 1
        os.sched_yield()

    held = socket_threads.os
    replaced = {"sched_getaffinity": lambda _: set(range(cores)), "sched_yield": counted}
    socket_threads.os = SimpleNamespace(**{**vars(os), **replaced})
    try:
        run()
    finally:
        socket_threads.os = held
    return count[0]


def of_a_step(cores: int) -> tuple[int, int]:
    """What two steps yield, and what they should."""
    step = made()
    found = yields(lambda: [step(*batch()) for _ in range(2)], cores)
    return found, 2 * len(turns(step.lower(*batch()).program))


def test_a_step_gives_way_on_one_core_only(ranks: Ranks) -> None:
    for found, expected in ranks.values(of_a_step, 1):
        assert found == expected > 0
    assert [found for found, _ in ranks.values(of_a_step, 2)] == [0, 0]


def of_a_calibration(cores: int) -> int:
    return yields(lambda: calibrate(0.05), cores)


def test_what_collectives_take_from_compute_is_measured_alike(ranks: Ranks) -> None:
    assert all(ranks.values(of_a_calibration, 1))
    assert ranks.values(of_a_calibration, 2) == [0, 0]
