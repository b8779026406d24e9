"""The registry of all sharding rules.

Why: docs/decisions.md, "Our own rules, not those of DTensor".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import Partial, Placement, R, divides
from commfuse_fx.sharding.rules.writing.call import OpCall, Rule, Strategy

_RULES: dict[Any, Rule] = {}

RuleT = TypeVar("RuleT", bound=Rule)


def rule(*targets: Any) -> Callable[[RuleT], RuleT]:
    """Decorator: this function is the rule of these ops."""

    def register(function: RuleT) -> RuleT:
        for target in targets:
            _RULES[target] = function
        return function

    return register


def set_rule(target: Any, function: Rule) -> None:
    """Give an op a rule, in place of the one it has."""
    _RULES[target] = function
    strategies_of.cache_clear()


def remove_rule(target: Any) -> None:
    """Take the rule of an op away."""
    _RULES.pop(target, None)
    strategies_of.cache_clear()


def find_rule(target: Any) -> Rule | None:
    """The rule of an op, or None."""
    return _RULES.get(target) or _generic(target)


def registered() -> list[Any]:
    """All ops with a rule of their own, in the order of registration."""
    return list(_RULES)


_GENERIC: list[Callable[[Any], Rule | None]] = []


def generic(function: Callable[[Any], Rule | None]) -> Callable[[Any], Rule | None]:
    """Decorator for a function that gives rules to kinds of ops, such as pointwise ones. It is called with ops that
    have no rule of their own."""
    _GENERIC.append(function)
    return function


def _generic(target: Any) -> Rule | None:
    for function in _GENERIC:
        found = function(target)
        if found is not None:
            return found
    return None


def replicated(call: OpCall) -> Strategy:
    """The strategy in which every rank computes the whole."""
    return Strategy((R,) * len(call.outputs), (R,) * len(call.inputs))


def compute_strategies(call: OpCall) -> tuple[Strategy, ...]:
    """All strategies of a call that its sizes and dtypes allow, the replicated one first."""
    function = find_rule(call.target)
    found: Sequence[Strategy] = function(call) if function is not None else ()
    own = [strategy for strategy in found if _possible(call, strategy)]
    return (replicated(call), *dict.fromkeys(own))


class _Memo:
    """A cache of strategies by call. Repeated blocks of a model have equal calls."""

    def __init__(self) -> None:
        self._known: dict[OpCall, tuple[Strategy, ...]] = {}

    def __call__(self, call: OpCall) -> tuple[Strategy, ...]:
        try:
            found = self._known.get(call)
        except TypeError:  # an argument that has no hash
            return compute_strategies(call)
        if found is None:
            found = self._known[call] = compute_strategies(call)
        return found

    def cache_clear(self) -> None:
        self._known.clear()


strategies_of = _Memo()


def _possible(call: OpCall, strategy: Strategy) -> bool:
    assert len(strategy.inputs) == len(call.inputs), f"{call.target}: one placement per tensor input"
    assert len(strategy.outputs) == len(call.outputs), f"{call.target}: one placement per output"
    pairs = (*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True))
    return all(_fits(spec, placement, call.ways) for spec, placement in pairs)


def _fits(spec: TensorSpec | None, placement: Placement, ways: int) -> bool:
    if spec is None:
        return placement == R
    if isinstance(placement, Partial):
        return spec.dtype.is_floating_point or spec.dtype.is_complex
    return divides(spec.shape, placement, ways)
