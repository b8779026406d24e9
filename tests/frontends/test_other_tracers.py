"""What records, exports or transforms programs itself is given the model, and not what compile() has made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import commfuse_fx as cf


def with_fake_values(model: nn.Module, x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(x)


RECORDERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jit": torch.jit.trace,
    "export": lambda model, x: torch.export.export(model, (x,)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "fake": with_fake_values,
}


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("name", RECORDERS)
def test_recorders_are_refused_and_leave_the_module_as_it_was(name: str, capture: str) -> None:
    compiled, x = cf.compile(nn.Linear(4, 2), capture=capture), torch.randn(3, 4)
    with pytest.raises(cf.NotAvailableError, match=r"hand it the model itself \(model.module\)"):
        RECORDERS[name](compiled, x)
    compiled(x).sum().backward()
    assert torch.equal(compiled.weight.grad, x.sum(0).expand(2, 4))


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_functional_transforms_are_refused(capture: str) -> None:
    """Also behind a call whose graph would fit."""
    compiled, x = cf.compile(nn.Sequential(nn.Linear(4, 2)), capture=capture), torch.randn(3, 4)
    doubled = {name: (param.detach() * 2).requires_grad_() for name, param in compiled.named_parameters()}
    for _ in range(2):
        with pytest.raises(cf.NotAvailableError, match="hand them the model itself"):
            torch.func.vmap(compiled)(x)
        with pytest.raises(cf.CaptureError, match="0.weight is a tensor in place of an nn.Parameter"):
            torch.func.functional_call(compiled, doubled, (x,))
        with pytest.raises(cf.CaptureError, match="0.bias is a tensor in place of an nn.Parameter"):
            torch.func.functional_call(compiled, {"0.bias": doubled["0.bias"]}, (x,))
        compiled.zero_grad()
        compiled(x).sum().backward()
        assert torch.equal(compiled.module[0].weight.grad, x.sum(0).expand(2, 4))
