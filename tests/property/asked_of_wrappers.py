"""Actions of users and libraries on what stands in front of a model; on the other side the bare model answers."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.property.random_models import build
from tests.property.trainee import Named, Trainee


def ask(trainee: Trainee, rng: random.Random) -> Named:
    """Names, state, parts and attributes; what is asked of a wrapper itself has one answer."""
    model, asked = trainee.model, trainee.asked
    if asked is not model:
        _ask_wrapper(asked, model)
    held = nn.ModuleDict({"part": asked})
    found = {f"state {name}": value.clone() for name, value in asked.state_dict().items()}
    found |= {f"parameter {name}": param.detach().clone() for name, param in asked.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in asked.named_buffers()}
    found |= {f"in another: {name}": value.clone() for name, value in held.state_dict().items()}
    names = [f"module {name}" for name, _ in asked.named_modules()]
    names += [f"in another: {name}" for name, _ in held.named_parameters()]
    names += [asked._get_name(), f"gain {asked._gain}", f"training {asked.training}"]
    names += [f"has {name}: {hasattr(asked, name)}" for name in ("parts", "_gain", "gain", "_tie", "nothing", "device")]
    return found | dict.fromkeys(names, torch.tensor(0))


def _ask_wrapper(wrapper: nn.Module, model: nn.Module) -> None:
    assert wrapper.module is model and [name for name, _ in wrapper.named_children()] == ["module"]
    assert wrapper.parts is model.parts and wrapper.get_submodule("head") is model.head
    wrapper._note = 1
    assert wrapper._note == 1 and not hasattr(model, "_note")
    del wrapper._note
    assert not hasattr(wrapper, "_note")
    for name in ("reducer", "static_graph"):
        with pytest.raises(cf.NotThereError, match=name):
            getattr(wrapper, name)


def load_through(trainee: Trainee, rng: random.Random) -> Named:
    """Also where another module holds it."""
    asked = nn.ModuleDict({"part": trainee.asked}) if rng.random() < 0.5 else trainee.asked
    state = {n: value * 0.9 if value.is_floating_point() else value for n, value in asked.state_dict().items()}
    assert not any(asked.load_state_dict(state))
    return {}


def set_through(trainee: Trainee, rng: random.Random) -> Named:
    """An attribute with an underscore, which the forward reads."""
    trainee.asked._gain = rng.choice((0.5, 0.9, 1.0))
    return {}


def freeze_through(trainee: Trainee, rng: random.Random) -> Named:
    trainee.asked.requires_grad_(False)
    trainee.asked.head.requires_grad_(True)
    return {}


def train_through(trainee: Trainee, rng: random.Random) -> Named:
    trainee.asked.eval()
    trainee.asked.train(rng.random() < 0.9)
    return {}


def another_model(trainee: Trainee, rng: random.Random) -> Named:
    """It is trained from now on, by an optimizer of its own."""
    other = build(trainee.spec).to(trainee.dtype)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.9)
    kind = type(trainee.optimizer)
    takes = inspect.signature(kind).parameters
    settings = {name: value for name, value in trainee.optimizer.defaults.items() if name in takes}
    if trainee.asked is not trainee.model:
        trainee.asked.module = other
    else:
        trainee.asked = other
    trainee.model, trainee.optimizer = other, kind(other.parameters(), **settings)
    trainee.held_back.clear()
    trainee.handles.clear()
    return {}


ASKED: Mapping[str, Callable[[Trainee, random.Random], Named]] = {"ask": ask, "load_through": load_through}
"""Those after which the same graph goes on."""

ASKED_AND_TRACED: Mapping[str, Callable[[Trainee, random.Random], Named]] = {
    "set_through": set_through,
    "freeze_through": freeze_through,
    "train_through": train_through,
    "another_model": another_model,
}
