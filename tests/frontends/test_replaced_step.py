"""An optimizer whose `step` the user has replaced on the instance: it is called, as eager training would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.oracle import ACROSS_STEPS

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "across": ACROSS_STEPS,
    "semi_auto": {"parallel_mode": "semi_auto", "mesh": (1,)},
}


def clip_after(optimizer: torch.optim.Optimizer) -> None:
    """As quantisation and pruning tools do."""
    step = optimizer.step

    @functools.wraps(step)
    def clipping(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.clamp_(-0.1, 0.1)

    optimizer.step = clipping  # type: ignore[method-assign, assignment]


def schedule(optimizer: torch.optim.Optimizer) -> None:
    """Wraps the method, and changes nothing."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def clip_scheduled(optimizer: torch.optim.Optimizer) -> None:
    schedule(optimizer)
    clip_after(optimizer)


CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer], None], bool]] = {
    "replaced": (clip_after, False),
    "scheduled": (schedule, True),
    "both": (clip_scheduled, False),
}


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after two steps"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_replaced_step_is_called(name: str, mode: str, late: bool) -> None:
    change, is_fused = CHANGES[name]
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1, momentum=0.9))
    step = cf.compile(models[0], loss_fn=nn.functional.mse_loss, optimizer=optimizers[0], **MODES[mode])
    for number in range(4):
        if number == 2 * late:
            list(map(change, optimizers))
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        optimizers[1].zero_grad()
        loss = nn.functional.mse_loss(models[1](x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach())
    step.synchronize()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    program = step.lower(x, y).program
    assert program.optimizer is not None and (program.optimizer.rule == "sgd") == is_fused


def test_a_scheduled_step_may_be_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW has the method of Adam, as it is once an Adam has been made."""
    model = nn.Linear(4, 2)
    torch.optim.Adam(model.parameters())
    if "step" in vars(torch.optim.AdamW):
        monkeypatch.delattr(torch.optim.AdamW, "step")
    optimizer = torch.optim.AdamW(model.parameters())
    schedule(optimizer)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    assert "# optimizer: AdamW (adamw)" in step.lower(torch.ones(6, 4), torch.ones(6, 2)).text()
