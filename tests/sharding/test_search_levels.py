"""Levels of the parallel optimizer as strategies: where memory has a limit, the search chooses among them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.virtual.virtual_world import LockstepWorld

WIDTH, ROWS = 256, 1024


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def compiled(limit: int | None, model: nn.Module | None = None, **options: Any) -> Any:
    model = model or deep()
    if limit is not None:
        options["schedule"] = cf.ScheduleConfig(memory_limit=limit)
    options = {"parallel_mode": "auto", "device_num": 4, "cluster": "h100-node", "mesh": (4,), **options}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fusion = {"openstate": False}  # so that few parameters are whole at once
    return cf.compile(model, fusion, loss_fn=F.mse_loss, optimizer=optimizer, **options)


def lowered(limit: int | None, **options: Any) -> Any:
    x = torch.empty(ROWS, WIDTH)
    return compiled(limit, **options).lower(x, x)


def level(found: Any) -> int:
    asked = found.program.config.parallel_optimizer
    return 0 if asked is None else asked.level


def fixed(number: int) -> dict[str, Any]:
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": number}}


def divided(found: Any) -> list[str]:
    alone = {name for name, param in found.program.params.items() if param.rows_alone}
    return [name for name, param in found.program.params.items() if param.layout and name not in alone]


@pytest.fixture(scope="module")
def peaks() -> dict[int, int]:
    """What data parallel takes, by level."""
    found = {0: {}, **{number: fixed(number) for number in (1, 2, 3)}}
    return {
        number: peak_memory(lowered(None, parallel_mode="semi_auto", **options).program)
        for number, options in found.items()
    }


def test_small_memory_finds_sharded_state_before_anything_slower(peaks: dict[int, int]) -> None:
    assert level(lowered(None)) == 0 and level(lowered(2 * peaks[0])) == 0
    limit = int(0.8 * peaks[0])
    found, fixed_level = lowered(limit), lowered(limit, **fixed(1))
    assert peaks[1] < limit and peak_memory(found.program) <= limit
    assert level(found) == 0 and divided(found) and not divided(fixed_level)  # weights in parts are state in parts, too
    assert found.simulate().step_seconds < fixed_level.simulate().step_seconds
    found = lowered(peaks[1] + 1024)
    assert level(found) > 0 and not divided(found)


def test_each_level_is_taken_where_the_one_before_is_too_large(peaks: dict[int, int]) -> None:
    assert level(lowered(peaks[3] + 1024)) == 3 and peaks[3] < peaks[2]
    with pytest.raises(cf.CommFuseError, match="is below what the step needs"):
        lowered(peaks[3] + 1024, parallel_mode="semi_auto", **fixed(2))


def test_what_the_user_says_of_levels_holds(peaks: dict[int, int]) -> None:
    assert level(lowered(peaks[1] + 1024, **fixed(2))) == 2
    assert level(lowered(2 * peaks[0], parallel_optimizer_config={"level": 2})) == 0
    assert level(lowered(peaks[1] + 1024, parallel_optimizer_config={"level": 2})) == 2


def test_a_strategy_file_has_the_level(peaks: dict[int, int], tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    first = lowered(peaks[1] + 1024, strategy_ckpt_save_file=file)
    assert Strategies.load(file).level == level(first) > 0
    assert lowered(peaks[1] + 1024, strategy_ckpt_load_file=file).text() == first.text()
    assert level(lowered(None, strategy_ckpt_load_file=file)) == level(first)
    assert level(lowered(None, strategy_ckpt_load_file=file, enable_parallel_optimizer=False)) == 0


@pytest.mark.parametrize("first", ["train", "evaluate"])
def test_training_and_evaluation_on_the_level_that_was_found(peaks: dict[int, int], first: str) -> None:
    model = deep()
    plain, optimizer = copy.deepcopy(model), None
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    world = LockstepWorld(compiled(peaks[3] + 1024, model))
    kinds = {"train": ("train", "evaluate", "train", "smaller"), "evaluate": ("evaluate", "train", "train", "evaluate")}
    for kind in kinds[first]:
        rows = ROWS // 2 if kind == "smaller" else ROWS
        x = torch.randn(4 * rows, WIDTH)
        loss = F.mse_loss(plain(x), x)
        for each in (plain, *world.models):
            each.train(kind != "evaluate")
        if kind != "evaluate":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        calls = [world.step.planner.take_apart((part, part), {}) for part in x.chunk(4)]
        for result in world.run(calls):
            torch.testing.assert_close(result.loss.detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    assert {level(plan.compiled) for plan in world.step.planner.plans.values() if plan.compiled.program.training} == {3}
    for mine in world.models:
        torch.testing.assert_close(list(mine.parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-5)
