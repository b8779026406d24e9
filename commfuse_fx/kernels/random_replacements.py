"""What stands in for each random op where numbers are to depend on the position in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.kernels.position_random import (
    bernoulli_at,
    bernoulli_of_at,
    dropout_at,
    exponential_at,
    normal_at,
    randint_at,
    randperm_at,
    uniform_at,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Replacement:
    """What stands in for a random op.

    convert(arguments, spec, seed, call) gives the arguments of `function` for a whole tensor. `arguments` are those of
    the op by the names of its schema, defaults filled in; spec: of the op's first result; seed and tensors may be
    anything that stands for them, such as graph nodes. It gives None for a call that draws nothing or that cannot be
    replaced (a generator of the user's own): that call stays as it is.
    """

    function: Callable[..., Any]
    convert: Callable[[dict[str, Any], TensorSpec, Any, int], tuple[Any, ...] | None]


def counter_based(target: Any) -> Replacement | None:
    """What stands in for this random op; None for ops without a replacement."""
    return _REPLACEMENTS.get(target)


def _from_start(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(spec.shape), spec.shape


def _native_dropout(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given["train"] is False:
        return None
    return (given["input"], given["p"], seed, call, *_from_start(spec))


def _bernoulli_of(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given.get("generator") is not None:
        return None
    return (given["self"], seed, call, *_from_start(spec))


def _permutation(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given.get("generator") is not None:
        return None
    return (given["n"], seed, call, spec.dtype, spec.device)


def _filling(*parameters: str | float) -> Callable[..., tuple[Any, ...] | None]:
    """For functions of (shape, *parameters, ...); a parameter is a constant or the name of an argument."""

    def convert(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
        if given.get("generator") is not None or spec.dtype.is_complex:
            return None
        values = tuple(given[each] if isinstance(each, str) else each for each in parameters)
        if None in values:
            return None
        return (spec.shape, *values, seed, call, *_from_start(spec), spec.dtype, spec.device)

    return convert


_UNIFORM = Replacement(uniform_at, _filling(0.0, 1.0))
_NORMAL = Replacement(normal_at, _filling(0.0, 1.0))
_INTEGERS = Replacement(randint_at, _filling(0, "high"))
_INTEGERS_FROM = Replacement(randint_at, _filling("low", "high"))

_REPLACEMENTS: dict[Any, Replacement] = {
    aten.native_dropout.default: Replacement(dropout_at, _native_dropout),
    aten.rand.default: _UNIFORM,
    aten.rand_like.default: _UNIFORM,
    aten.uniform.default: Replacement(uniform_at, _filling("from", "to")),
    aten.randn.default: _NORMAL,
    aten.randn_like.default: _NORMAL,
    aten.normal_functional.default: Replacement(normal_at, _filling("mean", "std")),
    aten.normal.float_float: Replacement(normal_at, _filling("mean", "std")),
    aten.exponential.default: Replacement(exponential_at, _filling("lambd")),
    aten.bernoulli.p: Replacement(bernoulli_at, _filling("p")),
    aten.bernoulli.default: Replacement(bernoulli_of_at, _bernoulli_of),
    aten.randint.default: _INTEGERS,
    aten.randint.low: _INTEGERS_FROM,
    aten.randint_like.default: _INTEGERS,
    aten.randint_like.low_dtype: _INTEGERS_FROM,
    aten.random.to: Replacement(randint_at, _filling(0, "to")),
    getattr(aten.random, "from"): Replacement(randint_at, _filling("from", "to")),
    aten.randperm.default: Replacement(randperm_at, _permutation),
}
