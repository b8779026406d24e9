"""A forward that reads what users have stored on parameters and buffers themselves, and behind weak references."""

from __future__ import annotations

import copy
import logging
import weakref
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


class Knob:
    def __init__(self) -> None:
        self.turned = 1.0


class OwnParameter(nn.Parameter):
    factor = 1.5

    def doubled(self) -> float:
        return 2.0 * self.factor


class ReadsTensors(nn.Module):
    layer: Any
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.own = OwnParameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))
        self.layer.weight.gain = 2.0
        self.mean.options = {"shift": [0.5]}
        self.knob = Knob()
        self.weak = weakref.ref(self.knob)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x) * getattr(self.layer.weight, "gain", 1.0) * getattr(self.layer.bias, "rate", 1.0)
        y = y + self.mean * self.mean.options["shift"][0]
        knob = self.weak()
        assert knob is not None
        if hasattr(self.own, "is_off"):
            return y.square().mean() + self.own.sum()
        return (y * self.own * self.own.doubled() * knob.turned).square().mean()


def twins() -> tuple[ReadsTensors, ReadsTensors]:
    return ReadsTensors(), ReadsTensors()


def set_gain(model: Any) -> None:
    model.layer.weight.gain = 0.5


def add_rate(model: Any) -> None:
    model.layer.bias.rate = 3.0


def remove_gain(model: Any) -> None:
    del model.layer.weight.gain


def set_inside(model: Any) -> None:
    model.mean.options["shift"][0] = 2.0


def turn_off(model: Any) -> None:
    model.own.is_off = True


def turn(model: Any) -> None:
    model.knob.turned = 2.5


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "value": (set_gain, "attribute layer.weight.gain: 2.0 -> 0.5"),
    "added": (add_rate, "attribute layer.bias.rate was added"),
    "removed": (remove_gain, "attribute layer.weight.gain: 2.0 -> absent"),
    "inside": (set_inside, "attribute mean.options['shift'][0]: 0.5 -> 2.0"),
    "own class": (turn_off, "attribute own.is_off was added"),
    "weak reference": (turn, ".turned: 1.0 -> 2.5"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHANGES)
def test_they_count_and_a_change_is_noticed(name: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    change, cause = CHANGES[name]
    model, twin = twins()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, twin)]
    step = cf.compile(model, optimizer=optimizers[0], **MODES[mode])
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for number in range(4):
            if number == 2:
                change(model)
                change(twin)
            if number == 3:
                model.layer.weight.unread = 1
            x = torch.randn(3, 4)
            optimizers[1].zero_grad()
            loss = twin(x)
            loss.backward()
            optimizers[1].step()
            torch.testing.assert_close(step(x), loss.detach())
    step.synchronize()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    (said,) = [each.getMessage() for each in caplog.records if "re-tracing" in each.getMessage()]
    assert said.endswith(cause)


def test_all_virtual_ranks_see_them() -> None:
    model = ReadsTensors()
    twin = copy.deepcopy(model)
    twin.weak = weakref.ref(twin.knob)
    for name, value in model.named_parameters():
        vars(twin.get_parameter(name)).update(vars(value))
    vars(twin.mean).update(vars(model.mean))
    cf.shard(model.layer.weight, ("dp", None))
    step = cf.compile(model, parallel_mode="semi_auto", mesh=(2,), device_num=2, full_batch=True, form="step")
    x = torch.randn(4, 4)
    run = cf.lockstep(step.lower(x), world=2)(x)
    want = twin(x)
    want.backward()
    torch.testing.assert_close(run.loss, want.detach())
    torch.testing.assert_close(run.grads["layer.weight"], twin.layer.weight.grad)


def test_what_is_not_there_raises_as_in_eager_execution() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: Any = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x).mean() * self.layer.weight.nothing

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        cf.compile(Wrong())(torch.randn(2, 4))
