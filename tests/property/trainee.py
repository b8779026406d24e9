"""A model in training with its optimizer, and what the user keeps of it between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.property.attribute_parts import attributes_of
from tests.property.random_models import ModelSpec, RandomModel, build, make_loss

Named = dict[str, torch.Tensor]


@dataclass
class Trainee:
    """`held_back`: parameters that the optimizer does not know yet. `handles`: hooks that can be removed again.
    `copies`: deep copies of the model with their values then, which nothing may change. `asked`: what libraries ask in
    place of the model, or the model."""

    spec: ModelSpec
    model: RandomModel
    optimizer: torch.optim.Optimizer
    loss_fn: Any
    dtype: torch.dtype
    held_back: list[nn.Parameter] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    copies: list[tuple[nn.Module, Named]] = field(default_factory=list)
    asked: Any = None

    def __post_init__(self) -> None:
        self.asked = self.model

    def parameters_of(self, rng: random.Random, *, trainable: bool | None = None) -> list[tuple[str, nn.Parameter]]:
        """Those of the parts (not of the head, so that something is always trained), in random order."""
        found = [
            (name, param)
            for name, param in self.model.parts.named_parameters()
            if trainable is None or param.requires_grad == trainable
        ]
        rng.shuffle(found)
        return found

    @contextmanager
    def reseated(self) -> Iterator[None]:
        """Parameters replaced in the block take over the places of the old ones in the optimizer, and their state where
        it fits."""
        before = dict(self.model.named_parameters(remove_duplicate=False))
        yield
        after = dict(self.model.named_parameters(remove_duplicate=False))
        replaced: dict[int, list[nn.Parameter]] = {}
        for name, param in before.items():
            new = replaced.setdefault(id(param), [])
            if name in after and not any(each is after[name] for each in new):
                new.append(after[name])
        old = {id(param): param for param in before.values()}
        taken: set[int] = set()
        for group in self.optimizer.param_groups:
            group["params"] = _once([new for param in group["params"] for new in replaced.get(id(param), [])], taken)
        self.held_back = _once([new for param in self.held_back for new in replaced.get(id(param), [])], taken)
        for key, news in replaced.items():
            if old[key] in self.optimizer.state and news and news[0] is not old[key]:
                state = self.optimizer.state.pop(old[key])
                if news[0].shape == old[key].shape:
                    self.optimizer.state[news[0]] = state

    def tensors(self) -> Named:
        """Everything that training and its forwards have changed, by name: copies."""
        found: Named = {}
        for name, param in self.model.named_parameters():
            found[name] = param.detach().clone()
            if param.grad is not None:
                found[f"{name}.grad"] = param.grad.clone()
            for key, value in self.optimizer.state.get(param, {}).items():
                if value is not None:
                    found[f"{name}.state.{key}"] = torch.as_tensor(value).detach().clone()
        for name, buffer in self.model.named_buffers():
            found[name] = buffer.clone()
        return found | attributes_of(self.model)


def _once(params: list[nn.Parameter], taken: set[int]) -> list[nn.Parameter]:
    """Without repetitions and without those that are taken, which these then are too."""
    kept = [param for number, param in {id(param): param for param in params}.items() if number not in taken]
    taken.update(map(id, kept))
    return kept


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1}),
}
"""Short name -> class and settings. Rprop is none of them: it makes whole steps of the signs of rounding noise."""

WITHOUT_FUSED = ("rmsprop", "nadam", "radam", "adamax", "adadelta", "asgd")
"""Those whose class takes no `fused`."""

FLAGS: dict[str, dict[str, Any]] = {"": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def make_trainee(spec: ModelSpec, optimizer: str, groups: str, flags: str, model: RandomModel | None = None) -> Trainee:
    """groups: "one", "two" (weights and the rest, with a learning rate each) or "held_back" (some come later)."""
    model = build(spec) if model is None else model
    made, settings = OPTIMIZERS[optimizer]
    if "eps" in made(model.parameters()).defaults:
        settings = {**settings, "eps": 1e-4 if spec.dtype == torch.float64 else 1e-2}  # or noise becomes whole steps
    params = list(model.parameters())
    held_back: list[nn.Parameter] = []
    if groups == "two":
        matrices = [param for param in params if param.ndim > 1]
        others = [param for param in params if param.ndim <= 1]
        given = [{"params": matrices}, {"params": others, "lr": settings["lr"] / 2}]
        given = [group for group in given if group["params"]]
    else:
        inner = list(model.parts.parameters())
        held_back = inner[::2] if groups == "held_back" else []
        given = [{"params": [param for param in params if not any(param is each for each in held_back)]}]
    return Trainee(spec, model, made(given, **settings, **FLAGS[flags]), make_loss(spec), spec.dtype, held_back)
