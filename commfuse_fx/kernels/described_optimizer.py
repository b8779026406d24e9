"""What the user's torch.optim object says of the graph: its class picks the rule, its param groups give the flags.

An optimizer with no rule is called as it is, as one opaque node at the end of the step.

Why: docs/decisions.md, "The elementwise optimizers of torch.optim have rules; other optimizers are opaque".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.program import OptimizerGroup, OptimizerInfo
from commfuse_fx.kernels.update_rules import BY_CLASS, Rule


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise unless this is a torch.optim optimizer over parameters of this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigTypeError(f"optimizer of type {type(optimizer).__name__} is not a torch.optim.Optimizer: pass one")
    if not any(group["params"] for group in optimizer.param_groups):
        raise ConfigValueError(
            f"optimizer={type(optimizer).__name__} holds no parameters: build it over model.parameters()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigValueError(
            "optimizer=LBFGS evaluates the loss several times in one step, which one traced step cannot: "
            "compile with optimizer=None and call it with a closure, or use another optimizer"
        )
    known = {id(param) for param in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ConfigValueError(
                    f"optimizer: parameter {position} of param group {number} (shape {tuple(param.shape)}) is not a "
                    "parameter of the model: build the optimizer over model.parameters() of the very model passed "
                    "to compile (after moving it to its device)"
                )


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerInfo:
    """The part of the optimizer that decides the graph: rule, groups and flags. Hashable, so it can be a cache key."""
    names = {id(param): name for name, param in model.named_parameters()}
    rule, why = _rule_of(optimizer)
    groups: list[OptimizerGroup] = []
    for group in optimizer.param_groups:
        members = tuple(names[id(param)] for param in group["params"])
        flags = rule.flags(group) if rule else {}
        groups.append(OptimizerGroup(members, tuple(flags.items())))
    name = rule.name if rule else "opaque"
    if name == "adam" and any(dict(group.flags)["decoupled"] for group in groups):
        name = "adamw" if all(dict(group.flags)["decoupled"] for group in groups) else "opaque"
        why = "its param groups mix coupled and decoupled weight decay" if name == "opaque" else ""
    return OptimizerInfo(name, type(optimizer).__name__, tuple(groups), why)


_observers: list[Callable[..., None]] = []


def observe_steps(hook: Callable[..., None]) -> None:
    """Call this ahead of every step of every optimizer. It changes no update: optimizers are known all the same."""
    _observers.append(hook)
    torch_optimizer.register_optimizer_step_pre_hook(hook)


def _rule_of(optimizer: torch.optim.Optimizer) -> tuple[Rule | None, str]:
    rule = BY_CLASS.get(type(optimizer))
    if rule is None:
        return None, f"{type(optimizer).__name__} has no rule in the compiler"
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooked:
        return None, "it has step hooks"
    ahead = torch_optimizer._global_optimizer_pre_hooks.values()
    if any(hook not in _observers for hook in ahead) or torch_optimizer._global_optimizer_post_hooks:
        return None, "step hooks of all optimizers are registered"
    if _is_replaced(vars(optimizer).get("step"), type(optimizer)):
        return None, "its method step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None, "it is differentiable"
    if any(any(map(torch.is_complex, group["params"])) for group in optimizer.param_groups):
        return None, "it updates complex parameters"
    return rule, ""


def _is_replaced(own: Any, cls: type) -> bool:
    """Whether an optimizer's own `step` is another one than its class has. Schedulers of torch wrap that one."""
    if own is None:
        return False
    return not getattr(own, "_wrapped_by_lr_sched", False) or own.__wrapped__ is not getattr(cls, "step", None)


def optimizer_key(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Any:
    """What of an optimizer decides the graph, cheap enough to look at before every step.

    names: those of the model's parameters, by id. The key has None for any other parameter.
    """
    rule, why = _rule_of(optimizer)
    groups = tuple(
        (tuple(map(names.get, map(id, group["params"]))), tuple(rule.flags(group).items()) if rule else ())
        for group in optimizer.param_groups
    )
    return (type(optimizer).__name__, why, groups)
