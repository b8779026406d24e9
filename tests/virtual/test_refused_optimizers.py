"""Optimizers whose update of some rows may not be that of the whole: refused with what to change, before any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import commfuse_fx as cf
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.virtual.virtual_world import LockstepWorld

Params = list[nn.Parameter]
MODES: dict[str, dict[str, Any]] = {"rows": {}, "rows alone": {"level": 3}, "owners": {"mode": "broadcast"}}


class Lamb(torch.optim.Optimizer):
    """As a user writes it: each parameter moves by as much of its own norm as the learning rate says."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.sub_(group["lr"] * param.norm() / average.norm() * average)


class Centered(torch.optim.AdamW):
    """An AdamW whose step does something more, to all of a parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.mean())
        return loss


class Renamed(torch.optim.AdamW):
    """Whose update is that of AdamW, as nobody but its author knows."""


def hooked(params: Params) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(params)
    made.register_step_post_hook(lambda *args: None)
    return made


def replaced(params: Params) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(params)
    made.step = lambda closure=None: None
    return made


def mixed(params: Params) -> torch.optim.Optimizer:
    groups = [{"params": params[:1]}, {"params": params[1:], "decoupled_weight_decay": True}]
    return torch.optim.Adam(groups, weight_decay=0.1)


def muon(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2])


KINDS: dict[str, tuple[Callable[[Params], torch.optim.Optimizer], str]] = {
    "lamb": (Lamb, "Lamb has no rule in the compiler"),
    "another step": (Centered, "Centered has no rule in the compiler"),
    "subclass": (Renamed, "Renamed has no rule in the compiler"),
    "muon": (muon, "Muon has no rule in the compiler"),
    "adafactor": (torch.optim.Adafactor, "Adafactor has no rule in the compiler"),
    "hook": (hooked, "it has step hooks"),
    "replaced step": (replaced, "its method step has been replaced"),
    "differentiable": (lambda params: torch.optim.SGD(params, differentiable=True), "it is differentiable"),
    "mixed decay": (mixed, "its param groups mix coupled and decoupled weight decay"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def compiled(net: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> cf.CompiledStep:
    return cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=optimizer, device_num=2, enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0, **MODES[mode]},
    )  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randint(0, 4, (4,))


def refusal(optimizer: torch.optim.Optimizer, why: str) -> str:
    name = type(optimizer).__name__
    return f"enable_parallel_optimizer=True with {name}: {why}, so it is not known.*change that, use an optimizer that"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_in_each_mode(kind: str) -> None:
    make, why = KINDS[kind]
    net = model()
    optimizer = make(list(net.parameters()))
    for mode in MODES:
        with pytest.raises(ConfigValueError, match=refusal(optimizer, why)):
            compiled(net, optimizer, mode).lower(*batch())


def test_complex_parameters_are_refused() -> None:
    net = nn.Linear(8, 4, dtype=torch.complex64)
    optimizer = torch.optim.AdamW(net.parameters())
    step = cf.compile(
        net, loss_fn=lambda out, y: (out - y).abs().mean(), optimizer=optimizer, device_num=2,
        enable_parallel_optimizer=True,
    )  # fmt: skip
    with pytest.raises(ConfigValueError, match=refusal(optimizer, "it updates complex parameters")):
        step.lower(torch.randn(2, 8, dtype=torch.complex64), torch.randn(2, 4, dtype=torch.complex64))


@contextmanager
def hook_of(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    handle = optimizer.register_step_pre_hook(lambda *args: None)
    yield "it has step hooks"
    handle.remove()


@contextmanager
def hook_of_all(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    handle = register_optimizer_step_post_hook(lambda *args: None)
    yield "step hooks of all optimizers are registered"
    handle.remove()


@pytest.mark.parametrize("change", [hook_of, hook_of_all])
@pytest.mark.parametrize("mode", MODES)
def test_what_comes_later_is_refused_and_leaves_everything_as_it_was(mode: str, change: Any) -> None:
    worlds = []
    for _ in range(2):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        worlds.append(LockstepWorld(compiled(net, optimizer, mode)))
    torch.manual_seed(0)
    batches = [[batch(), batch()] for _ in range(4)]
    for world in worlds:
        for each in batches[:2]:
            world(each)
    # Every rank's user does it, so all changes are there at once.
    one, other = worlds[0].optimizers
    with change(one) as why, change(other), pytest.raises(ConfigValueError, match=refusal(one, why)):
        worlds[0](batches[2])
    for world in worlds:
        for each in batches[2:]:
            world(each)
    for one, two in zip(worlds[0].models, worlds[1].models, strict=True):
        assert all(map(torch.equal, one.parameters(), two.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_half_a_momentum_is_refused_until_all_or_none_have_it(mode: str) -> None:
    net = model()
    world = LockstepWorld(compiled(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5), mode))
    world([batch()] * 2)
    for optimizer in world.optimizers:
        optimizer.state.pop(optimizer.param_groups[0]["params"][0])
    why = "only some parameters have a momentum buffer, and dampening is not 0"
    with pytest.raises(ConfigValueError, match=refusal(world.optimizers[0], why)):
        world([batch()] * 2)
    for optimizer in world.optimizers:
        optimizer.state.clear()
    world([batch()] * 2)
    assert all(len(optimizer.state_dict()["state"]) == 4 for optimizer in world.optimizers)


def test_hooks_of_all_optimizers_are_called_by_a_step_that_shares_nothing() -> None:
    net, seen = model(), []
    step = cf.compile(net, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    step(*batch())
    handle = register_optimizer_step_pre_hook(lambda optimizer, *args: seen.append(optimizer))
    try:
        step(*batch())
        assert seen == [step.optimizer]
    finally:
        handle.remove()
    step(*batch())
    assert len(seen) == 1
