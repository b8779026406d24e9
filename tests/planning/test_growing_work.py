"""What the passes do grows as the model does: twice the layers take about twice the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.planning import compile_call
from commfuse_fx.planning.compile_call import plan_step
from tests.work import calls

ACROSS = cf.ScheduleConfig(across_steps=True)
RANKS, WIDTH = 64, 64


def work(monkeypatch: pytest.MonkeyPatch, layers: int, options: dict[str, Any]) -> int:
    """The calls of all passes for a chain of so many layers."""
    counted = 0

    def planned(*arguments: Any, **named: Any) -> Any:
        nonlocal counted
        made = []
        counted += calls(lambda: made.append(plan_step(*arguments, **named)))
        return made[0]

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    step = cf.compile(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        device_num=RANKS,
        comm_fusion={"openstate": False},  # as many collectives as parameters, as in a model of large ones
        **options,
    )
    with monkeypatch.context() as patched:
        patched.setattr(compile_call, "plan_step", planned)
        step.lower(torch.ones(RANKS, WIDTH), torch.ones(RANKS, WIDTH))
    return counted


def sharded(level: int, **others: Any) -> dict[str, Any]:
    config = {"level": level, "parallel_optimizer_threshold": 0, **others}
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}


@pytest.mark.parametrize(
    "options",
    [
        {},
        sharded(1),
        sharded(3),
        sharded(1, mode="broadcast"),
        sharded(1) | {"schedule": ACROSS, "cluster": "h100-ib-8"},
        sharded(3) | {"clip_grad_norm": 1.0},
    ],
    ids=["plain", "state", "parameters", "owners", "across steps", "clipped"],
)
def test_twice_the_layers_take_twice_the_calls(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    work(monkeypatch, 1, options)  # what the first one imports and caches
    few, many = (work(monkeypatch, layers, options) for layers in (24, 48))
    assert many < 2.15 * few
