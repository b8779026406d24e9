"""Calls of the ops of layers, for tests of their rules: what they are made from, and the proof of their strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_fx.ir.core.placement import local_shape
from commfuse_fx.sharding.rules.prove import check_call, describe, run
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies

aten = torch.ops.aten

WAYS = pytest.mark.parametrize("ways", [2, 4])


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order, with gaps."""
    room = torch.zeros(*reversed(tensor.shape), 2, dtype=tensor.dtype)
    view = room[..., 0].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


def proved(target: Any, args: list[Any], ways: int, kwargs: dict[str, Any] | None = None) -> list[str]:
    """Descriptions of the call's strategies, all of them proved, with other strides too."""
    call, tensors = call_of(target, args, kwargs, ways)
    assert check_call(call, tensors, 1e-9, 1e-10) == []
    moved = [scattered(arg) if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg for arg in args]
    if _takes(target, moved, kwargs, _results(target, args, kwargs)):
        call, tensors = call_of(target, moved, kwargs, ways)
        assert check_call(call, tensors, 1e-9, 1e-10) == []
    return [describe(strategy) for strategy in compute_strategies(call)]


def _takes(target: Any, args: list[Any], kwargs: dict[str, Any] | None, expected: list[Any]) -> bool:
    """Whether the op itself can work with tensors that lie so in memory: some raise, some give wrong results."""
    try:
        results = _results(target, args, kwargs)
    except RuntimeError as error:
        if "contiguous" not in str(error) and "stride" not in str(error):
            raise
        return False
    return all(_same(a, b) for a, b in zip(expected, results, strict=True))


def _results(target: Any, args: list[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    out = target(*args, **(kwargs or {}))
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _same(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a, b, equal_nan=True)) if isinstance(a, torch.Tensor) else a == b


def found(call: OpCall, inputs: str) -> Strategy:
    (one,) = [s for s in compute_strategies(call) if describe(s).split(" -> ")[0] == inputs]
    return one


def targets(*shape: int, classes: int = 8) -> torch.Tensor:
    target = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    target.flatten()[1] = -100
    return target


def fake_locals(call: OpCall, strategy: Strategy, tensors: list[torch.Tensor]) -> list[Any]:
    """What one rank's steps give for parts of the right shapes, in fake tensors."""
    parts = []
    for tensor, placement in zip(tensors, strategy.inputs, strict=True):
        shape = local_shape(tensor.shape, placement, call.ways)
        parts.append([tensor.new_empty(shape)] * call.ways)
    return run(call, strategy, parts)[0]
