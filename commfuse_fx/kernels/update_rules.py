"""The optimizers whose update the compiler writes into the graph, and how they map onto kernels.

Flags of param groups are part of the graph. Hyper-parameters are read at every step.

Why: docs/decisions.md, "The elementwise optimizers of torch.optim have rules; other optimizers are opaque".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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

    def value_at_first(self, state: str, group: Mapping[str, Any]) -> float:
        """What a new state is filled with."""
        return self.initial[state](group) if state in self.initial else 0.0


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


def _only_maximize(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"maximize": bool(group["maximize"])}


def _decoupled_flags(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"decoupled": bool(group["decoupled_weight_decay"]), "maximize": bool(group["maximize"])}


def _rprop_hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate is where step sizes begin, and is not read again."""
    etas, sizes = map(float, group["etas"]), map(float, group["step_sizes"])
    return dict(zip(("etaminus", "etaplus", "step_size_min", "step_size_max"), (*etas, *sizes), strict=True))


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
    flags=_only_maximize,
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
    flags=_decoupled_flags,
    hyper=lambda group: {**_adam_hyper(group), "momentum_decay": float(group["momentum_decay"])},
    scalars=("step", "mu_product"),
    initial={"mu_product": lambda group: 1.0},
)
RADAM = Rule("radam", lambda flags: ("exp_avg", "exp_avg_sq"), _decoupled_flags, _adam_hyper)
ADAMAX = Rule("adamax", lambda flags: ("exp_avg", "exp_inf"), _only_maximize, _adam_hyper)
ADADELTA = Rule(
    "adadelta",
    states=lambda flags: ("square_avg", "acc_delta"),
    flags=_only_maximize,
    hyper=_floats("lr", "rho", "eps", "weight_decay"),
)
ASGD = Rule(
    "asgd",
    states=lambda flags: ("ax",),
    flags=_only_maximize,
    hyper=_floats("lr", "lambd", "t0", "alpha", "weight_decay"),
    scalars=("step", "eta", "mu"),
    initial={"eta": lambda group: float(group["lr"]), "mu": lambda group: 1.0},
)
RPROP = Rule(
    "rprop",
    states=lambda flags: ("prev", "step_size"),
    flags=_only_maximize,
    hyper=_rprop_hyper,
    initial={"step_size": lambda group: float(group["lr"])},
)

BY_CLASS: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.NAdam: NADAM,
    torch.optim.RAdam: RADAM,
    torch.optim.Adamax: ADAMAX,
    torch.optim.Adadelta: ADADELTA,
    torch.optim.ASGD: ASGD,
    torch.optim.Rprop: RPROP,
}
RULES = {rule.name: rule for rule in BY_CLASS.values()}
