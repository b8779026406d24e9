"""A hook that collects tensors is refused, wherever it puts them; one that counts is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf

GLOBAL: list[Any] = []


class Recorder:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def keep(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen["out"] = out.detach()

    def count(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen["count"] = self.seen.get("count", 0) + 1


def closure() -> Callable[..., None]:
    kept: list[Any] = []
    return lambda module, args, out: kept.append(out.mean())


def space() -> Callable[..., None]:
    held = SimpleNamespace(last=None)
    return lambda module, args, out: setattr(held, "last", out)


HOOKS: dict[str, Callable[[], Any]] = {
    "closure": closure,
    "object": space,
    "global": lambda: lambda module, args, out: GLOBAL.append([out]),
    "method": lambda: Recorder().keep,
    "partial": lambda: functools.partial(lambda kept, module, args, out: kept.append(out), []),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_a_module_that_keeps_tensors(kind: str) -> None:
    GLOBAL.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(HOOKS[kind]())
    with pytest.raises(cf.CaptureError, match="a hook of module 1 keeps a tensor of the trace in "):
        cf.compile(model)(torch.randn(2, 4))
    GLOBAL.clear()


def test_a_hook_of_a_parameter_that_keeps_its_gradients() -> None:
    model, norms = nn.Linear(4, 4), []
    model.weight.register_hook(lambda grad: norms.append(grad.norm()))
    with pytest.raises(cf.CaptureError, match="a hook of parameter weight keeps a tensor of the trace in norms"):
        cf.compile(model)(torch.randn(2, 4))


def test_hooks_that_keep_no_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(Recorder().count)
    model[0].register_full_backward_hook(lambda module, given, out: None)
    model[0].weight.register_hook(lambda grad: grad * 2)
    cf.compile(model)(torch.randn(2, 4)).sum().backward()
