"""A graph is the same whoever holds a reference to what the trace computes, such as a thread that samples frames."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.capture.trace.provenance import OriginRecorder


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


class Added(nn.Module):
    """Several parameters have one gradient, which is that of an input and of the output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.turned = (nn.Parameter(torch.ones(4)) for _ in range(4))
        self.wide, self.other = nn.Parameter(torch.ones(3, 4).t()), nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (self.wide + self.other).sum(1) * 2
        return x + self.a + self.b + torch.tanh(self.c + self.turned.flip(0)) + inner


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.tied, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = torch.tanh(self.tied(x))
        return self.tied(checkpoint(lambda y: torch.tanh(self.tied(y)), once, use_reentrant=self.reentrant))


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x.view(-1, 1, 2, 2)).flatten(1)[:, :1].expand(-1, 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": Normed,
    "added": Added,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed anew": lambda: Checkpointed(True),
    "maps": Maps,
}


def text_of(build: Callable[[], nn.Module], form: str) -> str:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    if form == "module":
        return cf.compile(build(), device_num=4).lower(x.requires_grad_()).text()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, device_num=4).lower(x, x).text()


@pytest.mark.parametrize("held", ["all", "every third"])
@pytest.mark.parametrize("form", ["module", "step"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_does_not_depend_on_who_holds_its_tensors(
    name: str, form: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = text_of(MODELS[name], form)
    dispatch, numbers, kept = OriginRecorder.__torch_dispatch__, count(), []
    every = {"all": 1, "every third": 3}[held]

    def hold(*args: Any, **kwargs: Any) -> Any:
        out = dispatch(*args, **kwargs)
        if next(numbers) % every == 0:
            kept.append(out)
        return out

    monkeypatch.setattr(OriginRecorder, "__torch_dispatch__", hold)
    assert text_of(MODELS[name], form) == want
    assert kept


def test_parameters_with_one_gradient_have_memory_of_their_own() -> None:
    module = cf.compile(Added())
    x, given = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    module(x).backward(given)
    grads = [param.grad for param in module.parameters()] + [x.grad, given]
    assert len({grad.untyped_storage().data_ptr() for grad in grads if grad is not None}) == len(grads)
    want = Added()
    want(y := x.detach().requires_grad_()).backward(given)
    for grad, other in zip(grads, [*(param.grad for param in want.parameters()), y.grad, given], strict=True):
        torch.testing.assert_close(grad, other)
