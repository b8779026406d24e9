"""parallel_mode="auto" with a memory limit: strategies that fit, the fastest of them, and errors that help."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.ir.updates.update_sharing import SHARED as SHARED_UPDATES
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.planning import compile_call
from commfuse_fx.sharding.search.kept_bytes import copies
from commfuse_fx.sharding.search.update_costs import moved_by_update
from tests.models import CONV, MLP_CASE, SHARED, TIED, Case
from tests.sharding.divided_oracle import compare
from tests.undrawn import undrawn

MIB = 1 << 20
MANY_ROWS = torch.empty(4096, 512)


def wide(width: int = 512) -> nn.Module:
    return undrawn(lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)))


def lowered(
    limit: float | None, mode: str = "auto", rows: torch.Tensor = MANY_ROWS, layers: int = 1, **options: Any
) -> Any:
    """The step with a limit in MiB."""
    model = wide() if layers == 1 else nn.Sequential(*(wide() for _ in range(layers)))
    if limit is not None:
        options["schedule"] = cf.ScheduleConfig(memory_limit=int(limit * MIB))
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(
        model,
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        parallel_mode=mode,
        **{"device_num": 8, "cluster": "h100-node", **options},
    )
    return step.lower(rows, rows)


def divided(found: Any) -> list[str]:
    return [name for name, param in found.program.params.items() if param.layout]


def test_the_fastest_strategy_that_fits() -> None:
    """More memory is not predicted to be slower, but for what searches miss."""
    free = lowered(None)
    limits = (100.0, 107.0, 119.0)
    found = [lowered(limit) for limit in limits]
    assert divided(free) == [] and peak_memory(free.program) > 119 * MIB
    for limit, each in zip(limits, found, strict=True):
        assert "0.weight" in divided(each) and peak_memory(each.program) <= limit * MIB
    seconds = [each.simulate().step_seconds for each in (*found, free)]
    assert all(later < 1.02 * earlier for earlier, later in pairwise(seconds)) and seconds[0] < 1.2 * seconds[-1]
    assert any("MiB taken" in note.reason for note in found[0].program.notes if note.topic == "search")
    with pytest.raises(cf.CommFuseError, match="is below what the step needs"):
        lowered(limits[-1], "semi_auto")


LEAST: dict[str, int] = {"saving": 1 << 40}


@pytest.mark.parametrize("case", [MLP_CASE, CONV, SHARED, TIED], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("choices", "mesh"),
    [
        (LEAST, (4,)),
        (LEAST, (2, 2)),
        ({"searched": False, "level": 1}, (2, 2)),  # on one axis it is held by tests of the parallel optimizer
        ({"searched": False, "level": 3}, (2, 2)),
    ],
    ids=["least memory", "least memory on two axes", "level 1", "level 3"],
)
def test_equals_one_device(
    case: Case, choices: dict[str, int], mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies that save memory compute what one device does."""
    only = Variants((Variant.of(**choices),))
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: only)
    options = {"parallel_optimizer_threshold": 0, "pad": True}
    asked = {"parallel_mode": "auto", "cluster": "h100-node", "memory_limit": 1 << 40}
    found = compare(case, mesh, gradients=False, parallel_optimizer_config=options, **asked)
    topics = [note.topic for note in found.program.notes]
    assert ("search" in topics, SHARED_UPDATES in topics) == ("saving" in choices, "level" in choices)


def test_plans_are_the_same_each_time() -> None:
    assert lowered(100.0).fingerprint == lowered(100.0).fingerprint


def test_a_limit_that_nothing_meets() -> None:
    with pytest.raises(cf.CommFuseError) as raised:
        lowered(10.0)
    message = str(raised.value)
    needed = float(message.split("(")[1].split(" MiB")[0])
    assert 50 < needed < 105 and f"{needed - 10:.1f} MiB too much" in message
    tried = re.search(r"needs (.*) MiB without it, (.*) MiB on level 1, (.*) MiB on level 3", message)
    by_level = [float(each) for each in tried.groups()]
    assert by_level[1:] == sorted(by_level[1:], reverse=True) and min(by_level) == pytest.approx(needed, rel=0.01)
    kept = float(re.search(r"what the forward keeps for the backward: (.*?) MiB", message)[1])
    hidden = 4096 * 4 * 4 * 512 / MIB  # the activations of a rank; inputs that it has gathered come with them
    assert 0.7 * hidden < kept < 1.6 * hidden
    assert "take up to" in message and "smaller batch" in message


def test_what_the_error_promises_is_what_it_brings() -> None:
    """Of the parallel optimizer on its last level, and of twice the devices."""
    rows = torch.empty(8, 512)  # parameters and states are nearly all of it
    options = {"mode": "semi_auto", "rows": rows, "layers": 6}

    def error(**more: Any) -> str:
        with pytest.raises(cf.CommFuseError) as raised:
            lowered(1.0, **options, **more)
        return str(raised.value)

    def needed(message: str) -> float:
        return float(message.split("(")[1].split(" MiB")[0])

    level3 = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": 3}}
    off, on = error(), error(**level3)
    promised = float(re.search(r", (\S+) MiB on level 3", off)[1])
    assert needed(on) == pytest.approx(promised, rel=0.01) and needed(on) < 0.7 * needed(off)
    promised = float(re.search(r"twice as many, .*, take up to (.*?) MiB less", on)[1])
    twice = error(**level3, device_num=16, cluster="h100-ib-2")
    assert 0.5 * promised < needed(on) - needed(twice) <= promised


OPTIMIZERS = {
    "adamw": (lambda params: torch.optim.AdamW(params), 4, 7),
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), 5, 9),
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1), 2, 3),
    "momentum": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 3, 5),
}


def captured(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: torch.Tensor, **options: Any) -> Any:
    step = cf.compile(
        model, loss_fn=F.mse_loss, optimizer=optimizer, parallel_mode="semi_auto", device_num=2, **options
    )
    return step.lower(x, x).captured


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_parameter_and_its_update_take(name: str) -> None:
    model = wide(4)
    model[0].bias.requires_grad_(False)
    make, count, moved = OPTIMIZERS[name]
    program = captured(model, make([each for each in model.parameters() if each.requires_grad]), torch.ones(4, 4))
    assert [copies(program, each) for each in ("0.weight", "0.bias")] == [count, 1]
    assert [moved_by_update(program, each) for each in ("0.weight", "0.bias")] == [moved, 0]


def test_what_the_parallel_optimizer_divides_does_not_count() -> None:
    found = []
    for level in (1, 2, 3):
        model = wide(4)
        options = {"level": level, "parallel_optimizer_threshold": 0}
        program = captured(
            model,
            torch.optim.AdamW(model.parameters()),
            torch.ones(4, 4),
            enable_parallel_optimizer=True,
            parallel_optimizer_config=options,
        )
        found.append(copies(program, "0.weight"))
    assert found == [2, 1, 0]


@pytest.mark.parametrize("rows", [4096, 32])
def test_the_bytes_that_a_search_counts_are_about_those_of_the_plan(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations take most of it, or parameters do."""
    only = Variants((Variant.of(saving=1),))
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: only)
    found = lowered(None, rows=torch.empty(rows, 512), layers=3)
    taken = [re.search(r"and (.*) MiB taken", note.reason) for note in found.program.notes if note.topic == "search"]
    assert float(taken[0][1]) * MIB == pytest.approx(peak_memory(found.program), rel=0.25)


def test_a_plan_that_a_higher_limit_has_found_is_found_below_it() -> None:
    """The peak of strategies that save more may lie elsewhere, and be higher there."""

    def peak(limit: int) -> int:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(2))
        model, x = nn.Sequential(*layers), torch.empty(512, 256)
        options = {"schedule": cf.ScheduleConfig(memory_limit=limit), "device_num": 16, "cluster": "h100-ib-2"}
        adamw = torch.optim.AdamW(model.parameters())
        step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=adamw, parallel_mode="auto", **options)
        return step.lower(x, x).simulate().peak_memory

    first = peak(18_900_000)
    assert peak(int(1.05 * first)) <= 1.05 * first


def test_a_plan_that_a_lower_limit_has_found_is_found_above_it() -> None:
    """Little is missing, and the peak of strategies that save just that by the search's count is no lower."""

    def step(limit: int) -> Any:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.empty(64, 1024)
        options = {"memory_limit": limit, "mesh": (8,), "cluster": "gloo-10gbit"}
        adamw = torch.optim.AdamW(model.parameters())
        return cf.compile(
            model, loss_fn=F.mse_loss, optimizer=adamw, parallel_mode="auto", device_num=8, **options
        ).lower(x, x)

    least = step(int(12.2 * MIB)).simulate().peak_memory
    for limit in (12.6, 13.0, 13.6):
        assert step(int(limit * MIB)).simulate().peak_memory <= limit * MIB
    for limit in (0.1, 7.0, 10.0):  # and what is said of it does not depend on how far off the limit is
        with pytest.raises(cf.CommFuseError, match=f"{least} bytes"):
            step(int(limit * MIB))
