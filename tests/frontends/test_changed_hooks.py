"""Hooks, modes and requires_grad may change between steps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.frontends.changing_models import Scale, doubled, retraced, values


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


def _double_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0] * 2,)


def _double_gradients(module: nn.Module, *grads: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in grads[0])


HOOKS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "forward": (lambda net: net[0].register_forward_hook(doubled), "of module 0 (forward, doubled) was added"),
    "forward_pre": (lambda net: net[1].register_forward_pre_hook(_double_input), "of module 1 (forward_pre, "),
    "full_backward": (lambda net: net[0].register_full_backward_hook(_double_gradients), "of module 0 (backward, "),
    "full_backward_pre": (
        lambda net: net[2].register_full_backward_pre_hook(_double_gradients), "of module 2 (backward_pre, "
    ),
    "with_kwargs": (
        lambda net: net[0].register_forward_hook(lambda m, i, k, o: o * 2, with_kwargs=True), "of module 0 (forward, "
    ),
    "parameter": (lambda net: net[0].weight.register_hook(doubled), "of parameter 0.weight (backward, doubled)"),
    "global": (lambda net: nn.modules.module.register_module_forward_hook(doubled), "of all modules (forward, "),
    "root": (lambda net: net.register_forward_hook(doubled), "of module Sequential (forward, "),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_and_go(name: str, caplog: pytest.LogCaptureFixture) -> None:
    add, cause = HOOKS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    reference = copy.deepcopy(net)
    step = cf.compile(net, loss_fn=F.mse_loss)

    def same() -> None:
        ((x, y),) = values()
        net.zero_grad(), reference.zero_grad()
        loss, want = step(x, y), F.mse_loss(reference(x), y)
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)

    same()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        handles = [add(net), add(reference)] if name != "global" else [add(net)]
        same()
        for handle in handles:
            handle.remove()
        same()
    (said,) = retraced(caplog)
    assert cause in said, said


def test_a_post_accumulate_grad_hook_added_later_is_refused() -> None:
    net = nn.Linear(8, 4)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    step(x, y)
    net.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(cf.CaptureError, match="post-accumulate-grad hook"):
        step(x, y)


def test_state_of_a_hook_is_noticed() -> None:
    net, hook = nn.Sequential(nn.Linear(8, 4)), Scale()
    net[0].register_forward_hook(hook)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    for factor in (1.0, 2.0):
        hook.factor = factor
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())


def test_modes_of_submodules_and_requires_grad(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0), nn.Linear(8, 4))
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    step(x, y)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        net[1].eval()
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
        net[0].weight.requires_grad_(False)
        step(x, y)
    causes = ["mode of module 1: train -> eval", "requires_grad of parameter 0.weight: True -> False"]
    assert retraced(caplog) == [f"re-tracing: {cause}" for cause in causes]
