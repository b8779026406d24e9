"""Convolutions of one to three dimensions, plain and transposed.

The weight is [out channels, in channels / groups, ...], that of a transposed convolution
[in channels, out channels / groups, ...].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, OpCall, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import on_first
from commfuse_fx.sharding.rules.writing.named import changed, strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


def _weight_dims(call: OpCall) -> tuple[Placement, Placement]:
    """Placements of the weight that divide its output channels, and its input channels."""
    return (S(1), S(0)) if call.bound()["transposed"] else (S(0), S(1))


@rule(aten.convolution.default)
def convolution(call: OpCall) -> Sequence[Strategy]:
    """Strategies by batch, by output channels, by input channels and by groups."""
    bound, ways = call.bound(), call.ways
    found = [strategy(call, {"input": S(0)}, (S(0),))]
    if bound["groups"] == 1:
        by_out, by_in = _weight_dims(call)
        found.append(strategy(call, {"weight": by_out, "bias": S(0)}, (S(1),)))
        steps: tuple[Step, ...] = ()
        if bound["bias"] is not None:
            steps = (Step(on_first, (bound["bias"], INDEX)), changed(call, {"bias": Result(0)}))
        found.append(strategy(call, {"input": S(1), "weight": by_in}, (P,), steps))
    elif bound["groups"] % ways == 0:
        step = changed(call, {"groups": bound["groups"] // ways})
        found.append(strategy(call, {"input": S(1), "weight": S(0), "bias": S(0)}, (S(1),), [step]))
    return found


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> Sequence[Strategy]:
    bound, ways = call.bound(), call.ways
    found = [strategy(call, {"grad_output": S(0), "input": S(0)}, (S(0), P, P))]
    sizes = bound["bias_sizes"]
    bias: dict[str, object] = {} if not sizes else {"bias_sizes": (sizes[0] // ways,)}
    if bound["groups"] == 1:
        by_out, by_in = _weight_dims(call)
        placed: dict[str, Placement] = {"grad_output": S(1), "weight": by_out}
        found.append(strategy(call, placed, (P, by_out, S(0)), [changed(call, bias)]))
        found.append(strategy(call, {"input": S(1), "weight": by_in}, (S(1), by_in, R)))
    elif bound["groups"] % ways == 0:
        step = changed(call, {**bias, "groups": bound["groups"] // ways})
        placed = {"grad_output": S(1), "input": S(1), "weight": S(0)}
        found.append(strategy(call, placed, (S(1), S(0), S(0)), [step]))
    return found
