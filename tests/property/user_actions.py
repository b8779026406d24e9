"""What users do to a model and its optimizer between two steps.

An action takes a trainee and random numbers, and does the same to every trainee it is given with the same numbers. What
it returns has to be equal as well.
"""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.property.asked_of_wrappers import ASKED, ASKED_AND_TRACED
from tests.property.copies_of_parts import COPIES
from tests.property.random_models import PARTS, default_dtype, eager_loss, make_batch
from tests.property.trainee import Named, Trainee

Action = Callable[[Trainee, random.Random], Named]


def freeze(trainee: Trainee, rng: random.Random) -> Named:
    for _, param in trainee.parameters_of(rng, trainable=True)[: rng.choice((1, 2))]:
        param.requires_grad_(False)
    return {}


def unfreeze(trainee: Trainee, rng: random.Random) -> Named:
    for _, param in trainee.parameters_of(rng, trainable=False)[: rng.choice((1, 2))]:
        param.requires_grad_(True)
    return {}


def add_group(trainee: Trainee, rng: random.Random) -> Named:
    if trainee.held_back:
        trainee.optimizer.add_param_group({"params": trainee.held_back[:], "lr": 0.02})
        trainee.held_back.clear()
    return {}


def load_model(trainee: Trainee, rng: random.Random) -> Named:
    state = {name: _moved(value.detach()) for name, value in trainee.model.state_dict().items()}
    trainee.model.load_state_dict(state)
    return {}


def assign_model(trainee: Trainee, rng: random.Random) -> Named:
    state = {name: _moved(value.detach()).clone() for name, value in trainee.model.state_dict().items()}
    with trainee.reseated():
        trainee.model.load_state_dict(state, assign=True)
    return {}


def load_optimizer(trainee: Trainee, rng: random.Random) -> Named:
    state = copy.deepcopy(trainee.optimizer.state_dict())
    for values in state["state"].values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and name != "step":
                values[name] = value * 0.5
    trainee.optimizer.load_state_dict(state)
    return {}


def forget_state(trainee: Trainee, rng: random.Random) -> Named:
    trainee.optimizer.state.clear()
    return {}


def change_lr(trainee: Trainee, rng: random.Random) -> Named:
    for group in trainee.optimizer.param_groups:
        group["lr"] *= rng.choice((0.5, 0.9, 1.2))
    return {}


def change_decay(trainee: Trainee, rng: random.Random) -> Named:
    group = rng.choice(trainee.optimizer.param_groups)
    group["weight_decay"] = rng.choice((0.0, 0.001, 0.1))
    if group.get("momentum"):
        group["momentum"] = rng.choice((0.5, 0.8))
    return {}


def change_attribute(trainee: Trainee, rng: random.Random) -> Named:
    if isinstance(trainee.loss_fn, nn.SmoothL1Loss) and rng.random() < 0.3:
        trainee.loss_fn.beta = rng.choice((0.5, 0.1))
        return {}
    parts = [part for part in trainee.model.parts if hasattr(part, "turn")]
    if parts:
        rng.choice(parts).turn(rng)
    return {}


def patch_forward(trainee: Trainee, rng: random.Random) -> Named:
    """For one call: the patch takes itself back."""
    module = rng.choice([*trainee.model.parts, trainee.model.head, trainee.model])
    module.forward = types.MethodType(_once, module)
    return {}


def _once(self: nn.Module, *batch: torch.Tensor) -> Any:
    del self.forward
    return self(batch[0] * 0.5, *batch[1:])


def part_mode(trainee: Trainee, rng: random.Random) -> Named:
    if len(trainee.model.parts):
        rng.choice(list(trainee.model.parts)).train(rng.random() < 0.5)
    return {}


def add_hook(trainee: Trainee, rng: random.Random) -> Named:
    kind = rng.choice(("forward", "pre", "gradient", "backward"))
    if kind == "gradient":
        for _, param in trainee.parameters_of(rng, trainable=True)[:1]:
            trainee.handles.append(param.register_hook(_halve))
        return {}
    module = rng.choice([*trainee.model.parts, trainee.model.head])
    if kind == "forward":
        trainee.handles.append(module.register_forward_hook(_scale_output))
    elif kind == "pre":
        trainee.handles.append(module.register_forward_pre_hook(_shift_input))
    else:
        trainee.handles.append(module.register_full_backward_hook(_scale_gradient))
    return {}


def remove_hook(trainee: Trainee, rng: random.Random) -> Named:
    if trainee.handles:
        trainee.handles.pop(rng.randrange(len(trainee.handles))).remove()
    return {}


def _halve(grad: torch.Tensor) -> torch.Tensor:
    return grad * 0.5


def _scale_output(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.75


def _shift_input(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0] + 0.1, *given[1:])


def _scale_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.9 for grad in inputs)


def replace_parameter(trainee: Trainee, rng: random.Random) -> Named:
    for name, param in trainee.parameters_of(rng)[:1]:
        if param.dim() and not param.requires_grad:
            continue
        path, _, last = name.rpartition(".")
        value = _laid_out(_moved(param.detach()), rng)
        with trainee.reseated():
            setattr(trainee.model.parts.get_submodule(path), last, nn.Parameter(value, param.requires_grad))
    return {}


def replace_module(trainee: Trainee, rng: random.Random) -> Named:
    if not len(trainee.model.parts):
        return {}
    place = rng.randrange(len(trainee.model.parts))
    if place >= len(trainee.spec.parts):
        return {}
    torch.manual_seed(rng.randrange(1000))
    with default_dtype(trainee.dtype), trainee.reseated():
        kind = trainee.spec.parts[place].kind
        trainee.model.parts[place] = PARTS[kind](random.Random(rng.randrange(1000)), trainee.spec.width)
    return {}


def set_data(trainee: Trainee, rng: random.Random) -> Named:
    for _, param in trainee.parameters_of(rng)[:2]:
        param.data = _laid_out(_moved(param.data), rng)
    return {}


def write(trainee: Trainee, rng: random.Random) -> Named:
    with torch.no_grad():
        for _, param in trainee.parameters_of(rng)[:2]:
            if rng.random() < 0.5:
                param.mul_(0.9)
            else:
                param.data.add_(0.01)
        for buffer in trainee.model.buffers():
            if buffer.is_floating_point() and rng.random() < 0.5:
                buffer.add_(0.01)
    return {}


def zero_grad(trainee: Trainee, rng: random.Random) -> Named:
    trainee.optimizer.zero_grad(set_to_none=rng.random() < 0.5)
    return {}


def set_gradient(trainee: Trainee, rng: random.Random) -> Named:
    for _, param in trainee.parameters_of(rng, trainable=True)[:1]:
        param.grad = torch.full_like(param, 0.01)
    return {}


def change_dtype(trainee: Trainee, rng: random.Random) -> Named:
    trainee.dtype = torch.float64 if trainee.dtype == torch.float32 else torch.float32
    trainee.model.to(trainee.dtype)
    trainee.optimizer.state.clear()
    for param in trainee.model.parameters():
        param.grad = None
    return {}


def eager_forward(trainee: Trainee, rng: random.Random) -> Named:
    """The user's own validation."""
    modes = [module.training for module in trainee.model.modules()]
    trainee.model.eval()
    batch = make_batch(trainee.spec, 3, rng.randrange(1000), trainee.dtype)
    with torch.no_grad():
        loss = eager_loss(trainee.model, trainee.loss_fn, batch)
    for module, mode in zip(trainee.model.modules(), modes, strict=True):
        module.training = mode
    return {"loss": loss}


def eager_backward(trainee: Trainee, rng: random.Random) -> Named:
    """A backward of the user's own, into `.grad`."""
    batch = make_batch(trainee.spec, 3, rng.randrange(1000), trainee.dtype)
    loss = eager_loss(trainee.model, trainee.loss_fn, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach()}


def clip(trainee: Trainee, rng: random.Random) -> Named:
    return {"norm": nn.utils.clip_grad_norm_(trainee.model.parameters(), 0.5)}


def _moved(value: torch.Tensor) -> torch.Tensor:
    return value * 0.9 + 0.01 if value.is_floating_point() else value


def _laid_out(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A copy in memory of its own, now and then column by column."""
    if value.ndim == 2 and rng.random() < 0.3:
        return value.t().clone(memory_format=torch.contiguous_format).t()
    return value.clone(memory_format=torch.contiguous_format)


CHEAP: Mapping[str, Action] = {
    "load_model": load_model,
    "load_optimizer": load_optimizer,
    "forget_state": forget_state,
    "change_lr": change_lr,
    "change_decay": change_decay,
    "write": write,
    "zero_grad": zero_grad,
    "set_gradient": set_gradient,
    "eager_forward": eager_forward,
    "eager_backward": eager_backward,
    "clip": clip,
    **COPIES,
}
"""Those after which the same graph goes on."""

COSTLY: Mapping[str, Action] = {
    "freeze": freeze,
    "unfreeze": unfreeze,
    "add_group": add_group,
    "assign_model": assign_model,
    "change_attribute": change_attribute,
    "part_mode": part_mode,
    "add_hook": add_hook,
    "remove_hook": remove_hook,
    "replace_parameter": replace_parameter,
    "replace_module": replace_module,
    "set_data": set_data,
    "change_dtype": change_dtype,
    "patch_forward": patch_forward,
}
"""Those after which the step is traced again."""

ACTIONS: Mapping[str, Action] = {**CHEAP, **COSTLY, **ASKED, **ASKED_AND_TRACED}
