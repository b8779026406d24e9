"""Clip the gradients of a compiled module by their norm, where ranks hold rows of them or their own ones as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.config.fusion_marks import read_layerwise_parallel
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import is_int, show


def clip_grad_norm(
    session: ModuleSession, params: Mapping[str, nn.Parameter], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all gradients of these parameters so that their norm is `max_norm` at most. Returns the norm they had.

    Raises ConfigTypeError or ConfigValueError for a bad norm, of which the other ranks hear where they vote, and
    what a vote raises.
    """
    held, own = session.parts.rows, _own_of_ranks(session, params)
    combines = held is not None or bool(own)
    try:
        _check(max_norm, "max_norm", 0.0)
        _check(norm_type, "norm_type", math.ulp(0.0))
    except (ConfigTypeError, ConfigValueError) as error:
        if combines:
            session.tell(error)
        raise
    with torch.no_grad():
        if not combines:
            return torch.nn.utils.clip_grad_norm_(list(params.values()), max_norm, norm_type)
        rows: list[torch.Tensor] = []
        apart: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for name, param in params.items():
            if held is not None and held.holds(name, param.grad):
                rows.append(held.rows(name))
            elif param.grad is not None:
                (apart if name in own else whole).append(param.grad)
        of_rows, of_others, of_whole = (
            _sum_of_powers(each, norm_type, session.device) for each in (rows, apart, whole)
        )
        is_largest = math.isinf(norm_type)
        total = torch.maximum(of_rows, of_others) if is_largest else of_rows / session.ranks_with_same_rows + of_others
        what = f"clip_grad_norm_({float(max_norm)}, norm_type={float(norm_type)})"
        session.combine_over_ranks(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, what)
        norm = torch.maximum(total, of_whole) if is_largest else (total + of_whole).pow(1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [*rows, *apart, *whole]
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        dtypes = [gradient.dtype for gradient in gradients]
        return norm.to(reduce(torch.promote_types, dtypes, dtypes[0])) if dtypes else norm.float()


def _own_of_ranks(session: ModuleSession, params: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of parameters of which each rank has its own."""
    if session.agreement is None or session.planner.config.parallel_mode != "hybrid_parallel":
        return set()
    return {name for name, param in params.items() if read_layerwise_parallel(param, name)}


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
