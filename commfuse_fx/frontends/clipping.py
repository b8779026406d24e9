"""Clip the gradients of a compiled module by their norm, where ranks hold rows of them as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.frontends.module_session import ModuleSession
from commfuse_fx.support.checks import is_int, show


def clip_grad_norm(
    session: ModuleSession, params: Mapping[str, nn.Parameter], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all gradients of these parameters so that their norm is `max_norm` at most. Returns the norm they had.

    Raises ConfigTypeError or ConfigValueError for a bad norm, of which the other ranks hear where they have rows, and
    what a vote raises.
    """
    held = session.parts.rows
    try:
        _check(max_norm, "max_norm", 0.0)
        _check(norm_type, "norm_type", math.ulp(0.0))
    except (ConfigTypeError, ConfigValueError) as error:
        if held is not None:
            session.tell(error)
        raise
    with torch.no_grad():
        if held is None:
            return torch.nn.utils.clip_grad_norm_(list(params.values()), max_norm, norm_type)
        rows = {name: held.rows(name) for name, param in params.items() if held.holds(name, param.grad)}
        whole = [param.grad for name, param in params.items() if name not in rows and param.grad is not None]
        total = _sum_of_powers([*rows.values()], norm_type, session.device)
        what = f"clip_grad_norm_({float(max_norm)}, norm_type={float(norm_type)})"
        session.combine_over_rows(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, what)
        total = _together(total, _sum_of_powers(whole, norm_type, session.device), norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in (*rows.values(), *whole):
            gradient.mul_(scale.to(gradient.dtype))
        dtypes = [gradient.dtype for gradient in (*rows.values(), *whole)]
        return total.to(reduce(torch.promote_types, dtypes, dtypes[0])) if dtypes else total.float()


def _check(value: object, where: str, least: float) -> None:
    if isinstance(value, bool) or not (is_int(value) or isinstance(value, float)):
        raise ConfigTypeError(f"{where} is {show(value)}; give a number")
    if not value >= least:
        raise ConfigValueError(f"{where} is {show(value)}; give a number {'> 0' if least else '>= 0'}")


def _sum_of_powers(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of all elements' powers, or the largest element."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    if not gradients:
        return found
    norms = torch.stack([norm.double().to(device) for norm in torch._foreach_norm(list(gradients), norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _together(one: torch.Tensor, other: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.maximum(one, other) if math.isinf(norm_type) else (one + other).pow(1 / norm_type)
