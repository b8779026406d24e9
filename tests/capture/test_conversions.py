"""Models that convert their own modules in forward: what changes nothing passes, all else is refused at its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import commfuse_fx as cf

Change = Callable[[nn.Module], object]


class Model(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.inner = nn.Module()
        self.inner.l = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        out: torch.Tensor = self.norm(self.inner.l(x)).square().mean()
        return out


def assign(model: nn.Module, module: nn.Module) -> None:
    model.inner.l = module  # type: ignore[union-attr]


def set_data(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = model.get_parameter("inner.l.weight")
    weight.data = make(weight)


HARMLESS: dict[str, Change] = {
    "to": lambda model: assign(model, model.inner.l.to(torch.float32)),  # type: ignore[union-attr]
    "to device": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "type": lambda model: model.inner.type(torch.float32),  # type: ignore[union-attr]
    "cpu": lambda model: model.cpu(),
    "data": lambda model: set_data(model, lambda weight: weight.data),
    "data to": lambda model: set_data(model, lambda weight: weight.data.to(torch.float32)),
}
HARMFUL: dict[str, tuple[Change, str]] = {
    "to": (lambda model: assign(model, model.inner.l.to(torch.float64)), "inner.l.weight"),  # type: ignore[union-attr]
    "half": (lambda model: model.half(), "inner.l.weight"),
    "type": (lambda model: model.norm.type(torch.float64), "norm.weight"),  # type: ignore[union-attr]
    "double": (lambda model: model.inner.double(), "inner.l.weight"),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_conversions_that_change_nothing(change: Change) -> None:
    found: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = Model(change), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = list(model.parameters())
        step = cf.compile(model, optimizer=optimizer, parallel_mode="stand_alone")
        for _ in range(2):
            if compiled:
                step(x)
                continue
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        found.append([*(each.detach() for each in model.parameters()), *model.buffers()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", HARMFUL)
def test_conversions_that_are_refused(name: str) -> None:
    change, message = HARMFUL[name]
    model = Model(change)
    before = {key: (value.dtype, value.clone()) for key, value in model.state_dict().items()}
    step = cf.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=2)
    with pytest.raises(cf.CaptureError, match=message) as raised:
        step.lower(torch.randn(3, 4))
    assert "test_conversions.py:" in str(raised.value)
    for key, value in model.state_dict().items():
        assert value.dtype == before[key][0] and torch.equal(value, before[key][1])
