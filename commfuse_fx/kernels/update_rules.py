"""The optimizers whose update the compiler writes into the graph, and how they map onto fused kernels.

The user's torch.optim object decides: its class picks the rule, its param groups give the flags (part
of the graph) and the hyper-parameters (read at every step). An optimizer with no rule here is called
as it is, as one opaque node at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.program import OptimizerGroup, OptimizerInfo

Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A rule is an elementwise update. Its functions take the flags of a param group, or the group itself.

    states: the state tensors that have the parameter's shape.
    flags: what decides the graph.
    hyper: the numbers that are read at every step.
    scalars: the states that are one number per parameter, in the order of torch.optim.
    initial: the values that new states are filled with, where they are not 0.
    """

    name: str
    states: Callable[[Flags], tuple[str, ...]]
    flags: Callable[[Mapping[str, Any]], dict[str, Any]]
    hyper: Callable[[Mapping[str, Any]], dict[str, Any]]
    scalars: tuple[str, ...] = ("step",)
    initial: Mapping[str, Callable[[Mapping[str, Any]], float]] = field(default_factory=dict)


def _adam_flags(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "amsgrad": bool(group["amsgrad"]),
        "maximize": bool(group["maximize"]),
        "decoupled": bool(group.get("decoupled_weight_decay", False)),
    }


def _number(value: Any) -> Any:
    """A hyper-parameter: a float, or a tensor on a device, which is read when a number is needed."""
    return value if isinstance(value, torch.Tensor) else float(value)


def _adam_hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "lr": _number(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "weight_decay": float(group["weight_decay"]),
        "eps": float(group["eps"]),
    }


def _floats(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda group: {name: _number(group[name]) if name == "lr" else float(group[name]) for name in names}


ADAM = Rule(
    "adam",
    states=lambda flags: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if flags["amsgrad"] else ())),
    flags=_adam_flags,
    hyper=_adam_hyper,
)
ADAMW = Rule("adamw", ADAM.states, lambda group: {**_adam_flags(group), "decoupled": True}, _adam_hyper)
SGD = Rule(
    "sgd",
    states=lambda flags: ("momentum_buffer",) if flags["momentum"] else (),
    flags=lambda group: {
        "momentum": group["momentum"] != 0,
        "nesterov": bool(group["nesterov"]),
        "maximize": bool(group["maximize"]),
    },
    hyper=_floats("weight_decay", "momentum", "lr", "dampening"),
    scalars=(),
)
ADAGRAD = Rule(
    "adagrad",
    states=lambda flags: ("sum",),
    flags=lambda group: {"maximize": bool(group["maximize"])},
    hyper=_floats("lr", "lr_decay", "weight_decay", "eps"),
)
RMSPROP = Rule(
    "rmsprop",
    states=lambda flags: (
        "square_avg",
        *(("momentum_buffer",) if flags["momentum"] else ()),
        *(("grad_avg",) if flags["centered"] else ()),
    ),
    flags=lambda group: {
        "momentum": group["momentum"] > 0,
        "centered": bool(group["centered"]),
        "maximize": bool(group["maximize"]),
        "weight_decay": group["weight_decay"] != 0,
    },
    hyper=_floats("lr", "alpha", "eps", "momentum", "weight_decay"),
)
NADAM = Rule(
    "nadam",
    states=lambda flags: ("exp_avg", "exp_avg_sq"),
    flags=lambda group: {
        "decoupled": bool(group["decoupled_weight_decay"]),
        "maximize": bool(group["maximize"]),
    },
    hyper=lambda group: {**_adam_hyper(group), "momentum_decay": float(group["momentum_decay"])},
    scalars=("step", "mu_product"),
    initial={"mu_product": lambda group: 1.0},
)

_BY_CLASS: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.NAdam: NADAM,
}
RULES = {rule.name: rule for rule in _BY_CLASS.values()}


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


def _rule_of(optimizer: torch.optim.Optimizer) -> tuple[Rule | None, str]:
    rule = _BY_CLASS.get(type(optimizer))
    if rule is None:
        return None, f"{type(optimizer).__name__} has no rule in the compiler"
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooked:
        return None, "it has step hooks"
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
