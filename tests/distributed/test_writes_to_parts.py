"""What users write to tensors that ranks divide has to be the same on all ranks, or parts of it would be lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, compiled, digest, mlp, xy
from tests.logs import logged

LEVEL_3: dict[str, Any] = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"level": 3, "parallel_optimizer_threshold": 0},
}
Call = Callable[[int], Any]
Write = Callable[[nn.Sequential, Any, int], None]


def as_step(level: int = 3) -> tuple[nn.Sequential, Any, Call]:
    model = mlp()
    optimizer = adamw(model)
    config = {"level": level, "parallel_optimizer_threshold": 0}
    step = compiled(model, optimizer, enable_parallel_optimizer=True, parallel_optimizer_config=config)
    return model, optimizer, lambda number: step(*xy(number))


def as_module() -> tuple[nn.Sequential, Any, Call]:
    model = mlp()
    made = cf.compile(model, **LEVEL_3)
    optimizer = cf.ShardedOptimizer(made, torch.optim.AdamW, lr=0.01)

    def call(number: int) -> None:
        optimizer.zero_grad()
        x, y = xy(number)
        F.cross_entropy(made(x), y).backward()
        optimizer.step()

    return model, optimizer, call


# Each gets what differs between ranks, or is the same on all of them.


def adds(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    with torch.no_grad():
        model[2].weight[-1].add_(odd)


def writes_past(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    """One element, and no version tells."""
    model[2].weight.data[3, 3] = 0.25 + odd


def swaps_elements(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    """Their sum stays."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    model[4].bias.data = values.roll(odd)


def loads(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    model.load_state_dict(mlp(seed=odd).state_dict())


def initialises(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    torch.manual_seed(odd)
    nn.init.normal_(model[0].weight)


def swaps_averages(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mine, param in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(torch.full_like(mine, 1e-6 * odd), 0.5)
            param.copy_(mine)


def scales_states(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    optimizer.state[model[2].weight]["exp_avg"].mul_(1 + odd)


def loads_states(model: nn.Sequential, optimizer: Any, odd: int) -> None:
    """The order in which a state lies in its dict counts for nothing."""
    held = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        held["state"] = {key: dict(reversed(state.items())) for key, state in held["state"].items()}
    held["state"][0]["exp_avg"].mul_(1 + odd)
    optimizer.load_state_dict(held)


WRITES: dict[Write, str] = {
    adds: "2.weight,",
    writes_past: "2.weight,",
    swaps_elements: "4.bias,",
    loads: "0.weight, 0.bias, 2.weight, 2.bias, 2 other tensors, of",
    initialises: "0.weight,",
    swaps_averages: "0.weight",
    scales_states: "2.weight/exp_avg",
    loads_states: "0.weight/exp_avg",
}
FORMS: dict[str, Callable[[], tuple[nn.Sequential, Any, Call]]] = {"step": as_step, "module": as_module}


def written(form: str) -> tuple[dict[str, str], list[str], str]:
    """What is said of writes that differ, and of those that do not, and a digest of what follows."""
    said, calm = {}, []
    for write in WRITES:
        model, optimizer, call = FORMS[form]()
        call(0)
        write(model, optimizer, 0)
        try:
            call(1)
        except cf.CommFuseError as error:
            calm.append(f"{write.__name__}: {error}")
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        write(model, optimizer, dist.get_rank())
        try:
            call(2)
        except cf.PlanMismatchError as error:
            said[write.__name__] = str(error)
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        call(3)
    return said, calm, digest(model)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_write_other_values_are_told(ranks: Ranks, form: str) -> None:
    found = ranks.values(written, form)
    for said, calm, _ in found:
        assert calm == []
        for write, names in WRITES.items():
            text = said.get(write.__name__, "went on")
            assert text.startswith("ranks 0 and 1 hold other values of "), (write.__name__, text)
            assert names in text, text
    assert found[0][2] == found[1][2]


def at_the_start() -> tuple[str, list[str]]:
    """A module sends rank 0's values when it is compiled, a step compares first values, and warns."""
    model = mlp()
    made = cf.compile(model, **LEVEL_3)
    initialises(model, None, dist.get_rank())
    try:
        made(xy(0)[0])
        said = ""
    except cf.PlanMismatchError as error:
        said = str(error)
    with logged() as messages:
        model = mlp(seed=dist.get_rank())
        compiled(model, adamw(model), **LEVEL_3)(*xy(0))
    return said, [text for text in messages if "parameters differ" in text]


def test_values_to_begin_with(ranks: Ranks) -> None:
    for said, warned in ranks.values(at_the_start):
        assert "other values of 0.weight," in said
        assert len(warned) == 1


def states_alone(level: int) -> list[str]:
    """They are written where they are, and replaced while each rank has its part of them."""
    model, optimizer, call = as_step(level)
    call(0)
    held = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(held)
    other["state"][0]["exp_avg"].mul_(1 + dist.get_rank())
    call(1)
    said = []
    for change in (
        lambda: scales_states(model, optimizer, dist.get_rank()),
        lambda: optimizer.load_state_dict(copy.deepcopy(other)),
    ):
        change()
        try:
            call(2)
        except cf.PlanMismatchError as error:
            said.append(str(error))
        optimizer.load_state_dict(copy.deepcopy(held))
        call(3)
    return said


@pytest.mark.parametrize("level", [1, 2, 3])
def test_states_alone(ranks: Ranks, level: int) -> None:
    for written, loaded in ranks.values(states_alone, level):
        assert "other values of 2.weight/exp_avg," in written
        assert "other values of 0.weight/exp_avg," in loaded
