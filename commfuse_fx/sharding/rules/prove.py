"""Prove strategies by execution: run each on the parts that ranks would have, and compare with the whole.

Why: docs/decisions.md, "Our own rules, not those of DTensor".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from commfuse_fx.ir.core.placement import Partial, Placement, Replicate, assemble, take
from commfuse_fx.sharding.rules.writing.call import INDEX, AllReduce, OpCall, Ref, Result, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies

Tensors = list[torch.Tensor]


def check_call(call: OpCall, tensors: Sequence[torch.Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> list[str]:
    """Run every strategy of a call on these tensors; returns one line per strategy whose result is wrong."""
    wrong: list[str] = []
    for strategy in compute_strategies(call):
        problem = check_strategy(call, strategy, tensors, rtol, atol)
        if problem:
            wrong.append(f"{call.target} {describe(strategy)}: {problem}")
    return wrong


def describe(strategy: Strategy) -> str:
    """The placements of a strategy as text, such as `R, S(1) -> S(1)`."""
    return f"{', '.join(map(str, strategy.inputs))} -> {', '.join(map(str, strategy.outputs))}"


def check_strategy(
    call: OpCall, strategy: Strategy, tensors: Sequence[torch.Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> str:
    """Run a strategy; returns what is wrong with its result as text, or an empty string."""
    whole = _results(_invoke(call.target, call.args, call.kwargs, lambda ref: tensors[ref.index], None, 0))
    parts = [_divide(tensor, p, call.ways) for tensor, p in zip(tensors, strategy.inputs, strict=True)]
    try:
        locals_ = run(call, strategy, parts)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    for number, (expected, placement) in enumerate(zip(whole, strategy.outputs, strict=True)):
        if not isinstance(expected, torch.Tensor):
            continue
        found = [results[number] for results in locals_]
        problem = _difference(found, expected, placement, rtol, atol)
        if problem:
            return f"output {number} ({placement}) {problem}"
    return ""


def run(call: OpCall, strategy: Strategy, parts: Sequence[Tensors]) -> list[list[Any]]:
    """Run a strategy on all ranks in lockstep. parts[i][rank]: input i of a rank. Returns the outputs by rank."""
    ranks = range(call.ways)

    def parts_of(rank: int) -> Callable[[Ref], torch.Tensor]:
        return lambda ref: parts[ref.index][rank]

    if not strategy.steps:
        return [_results(_invoke(call.target, call.args, call.kwargs, parts_of(rank), None, rank)) for rank in ranks]
    made: list[list[Any]] = [[] for _ in ranks]  # by rank: the results of the steps so far
    for step in strategy.steps:
        if isinstance(step, AllReduce):
            values = [_look_up(step.value, parts, made[rank], rank) for rank in ranks]
            # Like the backends of torch.distributed, fmax drops a NaN.
            total = torch.stack(values).sum(0) if step.op == "sum" else reduce(torch.fmax, values)
            for rank in ranks:
                made[rank].append(total)
            continue
        for rank in ranks:
            made[rank].append(_invoke(step.target, step.args, step.kwargs, parts_of(rank), made[rank], rank))
    if strategy.results:
        return [[_pick(each, mine) for each in strategy.results] for mine in made]
    return [_results(mine[-1]) for mine in made]


def _look_up(value: Ref | Result, parts: Sequence[Tensors], made: list[Any], rank: int) -> torch.Tensor:
    found: torch.Tensor = parts[value.index][rank] if isinstance(value, Ref) else _pick(value, made)
    return found


def _pick(result: Result, made: Sequence[Any]) -> Any:
    value = made[result.step]
    return value if result.item is None else value[result.item]


def _invoke(
    target: Any,
    args: Any,
    kwargs: Sequence[tuple[str, Any]],
    tensor_of: Callable[[Ref], Any],
    made: Sequence[Any] | None,
    rank: int,
) -> Any:
    def bind(value: Any) -> Any:
        if isinstance(value, Ref):
            return tensor_of(value)
        if isinstance(value, Result):
            return _pick(value, made or ())
        if value is INDEX:
            return rank
        if isinstance(value, tuple):
            return [bind(item) for item in value]
        return value

    named: Mapping[str, Any] = {name: bind(value) for name, value in kwargs}
    return target(*(bind(arg) for arg in args), **named)


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _divide(tensor: torch.Tensor, placement: Placement, ways: int) -> Tensors:
    """The ranks' parts; summands are random, and add up to the tensor."""
    if isinstance(placement, Replicate):
        return [tensor] * ways
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(7)
        parts = [
            torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor) for _ in range(ways - 1)
        ]
        return [*parts, tensor - sum(parts)]
    return [take(tensor, placement, ways, rank) for rank in range(ways)]


def _difference(found: Tensors, expected: torch.Tensor, placement: Placement, rtol: float, atol: float) -> str:
    if isinstance(placement, Replicate) and any(not _close(part, found[0], rtol, atol) for part in found):
        return "differs between ranks"
    joined = assemble(found, placement)
    if joined.shape != expected.shape or joined.dtype != expected.dtype:
        return f"is {joined.dtype}{list(joined.shape)}, not {expected.dtype}{list(expected.shape)}"
    return "" if _close(joined, expected, rtol, atol) else f"is off by {_error(joined, expected):.3g}"


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol, atol, equal_nan=True)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.is_floating_point() else float((a != b).sum())
