"""Updates that take their learning rate from memory of the device, also those whose op takes it as a number only.

Why: docs/decisions.md, "A learning rate is a number in the graph until it varies".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.bound_arguments import arguments_of
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.updates.whole_updates import WHOLE_UPDATES
from commfuse_fx.runtime.execute.code.bindings import bound

aten = torch.ops.aten

_FUSED: dict[Any, str] = {
    aten._fused_adagrad_.default: "aten::_fused_adagrad_.tensor_lr",
    aten._fused_adam_.default: "aten::_fused_adam_.tensor_lr",
    aten._fused_adamw_.default: "aten::_fused_adamw_.tensor_lr",
    aten._fused_sgd_.default: "aten::_fused_sgd_.tensor_lr",
}
"""Updates that take the rate as a tensor of float32 too, with the names of those overloads."""

_LISTS = (aten._foreach_add_.List, aten._foreach_addcdiv_.Scalar)
"""The last ops of updates that have no fused kernel."""

_WHOLE: dict[Any, Any] = {update.op: update.at_rate for update in WHOLE_UPDATES.values() if update.at_rate is not None}
"""Updates that take the rate as a tensor of any dtype too, and those overloads."""


def updates_at(rate: fx.Node) -> dict[fx.Node, str]:
    """The updates that take this learning rate or its negative, and the names of the arguments that it is."""
    found: dict[fx.Node, str] = {}
    for user in rate.users:
        if user.target is operator.neg:
            found |= updates_at(user)
        else:
            found[user] = next(name for name, value in arguments_of(user).items() if value is rate)
    return found


def dtype_of_rate(updates: Iterable[fx.Node]) -> torch.dtype | None:
    """In what dtype these updates take their rate as a tensor. None: they take it as a number only.

    Updates of parameters that are no blocks of memory are of that kind: such parameters may share memory.
    """
    if not all(update.target in (*_FUSED, *_LISTS, *_WHOLE) for update in updates):
        return None
    of_params = {tensor_spec(param).dtype for update in updates for param in _params(update)}
    if not of_params:
        return None
    return torch.float64 if torch.float64 in of_params else torch.float32


def has_kernel_for_tensors(update: fx.Node) -> bool:
    """Whether PyTorch has a kernel of the update that takes the rate as a tensor of float32."""
    overload = _FUSED.get(update.target)
    kind = torch.device(tensor_spec(_params(update)[0]).device).type
    return overload is not None and torch._C._dispatch_has_kernel_for_dispatch_key(overload, kind.upper())


def at_any_rate(update: fx.Node, name: str) -> Callable[..., None]:
    """The op of an update, which also takes as a tensor the learning rate that is its argument `name`.

    Where it has no overload for that, the op runs at the rate one, and that part of the change is taken which the rate
    says: parameters change in proportion to it.
    """
    target: Any = update.target
    if target in _WHOLE:
        return _by_kind(target, _WHOLE[target], name)
    run = bound(target)
    place = next(place for place, argument in enumerate(target._schema.arguments) if argument.name == name)

    def run_at(*args: Any, **kwargs: Any) -> None:
        rate = kwargs[name] if name in kwargs else args[place]
        if not isinstance(rate, torch.Tensor):
            run(*args, **kwargs)
            return
        params: list[torch.Tensor] = args[0]
        before = [param.clone() for param in params]
        if name in kwargs:
            kwargs[name] = 1.0
        else:
            args = (*args[:place], 1.0, *args[place + 1 :])
        run(*args, **kwargs)
        for param, old in zip(params, before, strict=True):
            param.copy_(torch.lerp(old.to(rate.dtype), param.to(rate.dtype), rate))

    return run_at


def _by_kind(with_number: Any, with_tensor: Any, name: str) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        (with_tensor if isinstance(kwargs[name], torch.Tensor) else with_number)(*args, **kwargs)

    return run


def _params(update: fx.Node) -> list[fx.Node]:
    params: Any = update.args[0]
    return list(params)
