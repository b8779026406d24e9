"""`cf.register_rule` takes sharding rules of users for their own ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.sharding.rules.prove import check_call
from commfuse_fx.sharding.rules.writing import rule_registry
from commfuse_fx.sharding.rules.writing.call import OpCall, Rule, Strategy, call_of
from commfuse_fx.support.checks import show
from commfuse_fx.support.tracebacks import user_frames_only

_WAYS = (2, 4)


@user_frames_only
def register_rule(
    op: Any, rule: Rule | None = None, *, examples: Sequence[Sequence[Any]] = ()
) -> Rule | Callable[[Rule], Rule]:
    """Say how an op can be divided along one mesh axis; also a decorator.

        from commfuse_fx.sharding import P, R, S, Strategy

        @cf.register_rule(torch.ops.mine.scale_rows, examples=[(torch.randn(8, 4), torch.randn(8))])
        def scale_rows(call):  # (x[n, m], s[n]) -> [n, m]
            return [Strategy(outputs=(S(0),), inputs=(S(0), S(0))), Strategy((S(1),), (S(1), R))]

    op: an op of torch.ops, with or without its overload (then its only one), or what torch.library.custom_op
        returns.
    rule: a function that takes an `OpCall` and returns its `Strategy`s. The one that replicates everything is added
        to them. Strategies that sizes or dtypes do not allow are dropped.
    examples: argument tuples to prove the rule with. Every strategy runs on the parts that 2 and 4 ranks would have,
        and its results are compared with those of the op on the whole tensors.

    Placements are `R` (whole on every rank), `S(dim)` (an equal part of a dimension) and `P` (a summand). The rule
    replaces an earlier rule of the op.

    Raises ConfigTypeError if `op` is no op, if the rule is not callable or if it returns something else than Strategy.
    Raises ConfigValueError, with the difference, if a strategy gives a wrong result, and if no strategy but the
    replicated one fits an example.
    """
    target = _overload(op)
    if rule is None:
        return lambda function: _register(target, function, examples)
    return _register(target, rule, examples)


def _register(target: Any, rule: Rule, examples: Sequence[Sequence[Any]]) -> Rule:
    if not callable(rule):
        raise ConfigTypeError(f"rule of {target} is {show(rule)}; give a function of an OpCall")
    before = rule_registry.find_rule(target)
    rule_registry.set_rule(target, _checked(target, rule))
    try:
        for number, example in enumerate(examples):
            _prove(target, number, tuple(example))
    except BaseException:
        if before is not None:
            rule_registry.set_rule(target, before)
        else:
            rule_registry.remove_rule(target)
        raise
    return rule


def _overload(op: Any) -> Any:
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        if len(names) != 1:
            raise ConfigTypeError(f"op is {op}, which has the overloads {', '.join(names)}; give one of them")
        op = getattr(op, names[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise ConfigTypeError(f"op is {show(op)}; give an op such as torch.ops.mine.scale_rows.default")
    return op


def _checked(target: Any, rule: Rule) -> Rule:
    def checked(call: OpCall) -> Sequence[Strategy]:
        found = list(rule(call))
        for each in found:
            if not isinstance(each, Strategy):
                raise ConfigTypeError(f"the rule of {target} gives {show(each)}; give commfuse_fx.sharding.Strategy")
            if len(each.inputs) != len(call.inputs) or len(each.outputs) != len(call.outputs):
                raise ConfigValueError(
                    f"the rule of {target} gives {len(each.inputs)} input and {len(each.outputs)} output placements; "
                    f"this call has {len(call.inputs)} tensor inputs and {len(call.outputs)} outputs"
                )
        return found

    return checked


def _prove(target: Any, number: int, example: tuple[Any, ...]) -> None:
    fits = 0
    for ways in _WAYS:
        call, tensors = call_of(target, example, ways=ways)
        fits += len(rule_registry.compute_strategies(call)) - 1
        wrong = check_call(call, tensors)
        if wrong:
            raise ConfigValueError(
                f"the rule of {target} is wrong, as example {number} shows for {ways} ranks: {'; '.join(wrong)}"
            )
    if not fits:
        raise ConfigValueError(
            f"example {number} of {target} proves nothing: no strategy of the rule fits its sizes; give dimensions "
            "that divide by 4"
        )
