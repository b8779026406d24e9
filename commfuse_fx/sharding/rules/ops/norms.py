"""Layer, RMS, group and batch normalisation.

Dimensions over which no statistics are taken can be divided. Partial sums cannot go in: no norm is linear, and the
backward ops, which are linear in the gradient, would compute everything `ways` times.

On the CPU the backward ops of layer and group norm give wrong results, without a message, for statistics that are not
contiguous (torch 2.13), so the local tensors are made contiguous first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import OpCall, Step, Strategy
from commfuse_fx.sharding.rules.writing.named import changed, on_contiguous, spec_of_argument, strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


def _outer_dims(call: OpCall) -> range:
    """The dimensions of the input of a layer or RMS norm that are not normalised."""
    spec = spec_of_argument(call, "input")
    assert spec is not None
    return range(len(spec.shape) - len(call.bound()["normalized_shape"]))


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(call: OpCall) -> Sequence[Strategy]:
    return [strategy(call, {"input": S(d)}, (S(d),) * len(call.outputs)) for d in _outer_dims(call)]


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: OpCall) -> Sequence[Strategy]:
    names = ("grad_out", "input", "mean", "rstd")
    steps = on_contiguous(call, names)
    return [strategy(call, dict.fromkeys(names, S(d)), (S(d), P, P), steps) for d in _outer_dims(call)]


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: OpCall) -> Sequence[Strategy]:
    names = ("grad_out", "input", "rstd")
    steps = on_contiguous(call, names)
    return [strategy(call, dict.fromkeys(names, S(d)), (S(d), P), steps) for d in _outer_dims(call)]


@rule(aten.native_group_norm.default)
def group_norm(call: OpCall) -> Sequence[Strategy]:
    """Strategies by batch, and by groups of channels."""
    bound, ways = call.bound(), call.ways
    by_batch = changed(call, {"N": bound["N"] // ways})
    found = [strategy(call, {"input": S(0)}, (S(0),) * 3, [by_batch])]
    if bound["group"] % ways == 0:
        by_channel = changed(call, {"C": bound["C"] // ways, "group": bound["group"] // ways})
        placed: dict[str, Placement] = {"input": S(1), "weight": S(0), "bias": S(0)}
        found.append(strategy(call, placed, (S(1),) * 3, [by_channel]))
    return found


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(call: OpCall) -> Sequence[Strategy]:
    bound, ways = call.bound(), call.ways
    names = ("grad_out", "input", "mean", "rstd")
    by_batch = on_contiguous(call, names, {"N": bound["N"] // ways})
    found = [strategy(call, dict.fromkeys(names, S(0)), (S(0), P, P), by_batch)]
    if bound["group"] % ways == 0:
        by_channel = on_contiguous(call, names, {"C": bound["C"] // ways, "group": bound["group"] // ways})
        placed: dict[str, Placement] = {**dict.fromkeys(names, S(1)), "weight": S(0)}
        found.append(strategy(call, placed, (S(1), S(0), S(0)), by_channel))
    return found


_MUTATING = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _channels(call: OpCall) -> dict[str, Placement]:
    """Placements of what a batch norm has per channel. In evaluation the saved statistics are empty."""
    bound = call.bound()
    placed: dict[str, Placement] = {}
    for name in _PER_CHANNEL:
        if name in bound:
            spec = spec_of_argument(call, name)
            placed[name] = S(0) if spec is not None and spec.numel else R
    return placed


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
)
def batch_norm(call: OpCall) -> Sequence[Strategy]:
    """Strategies by channel, and in evaluation by batch. In training, decompose.py writes batch norm as sums."""
    training = call.bound().get("training", False)
    if training and call.target is aten.cudnn_batch_norm.default:
        return []  # its last result is memory whose layout only cuDNN knows
    if training and call.target in _MUTATING and call.bound()["running_mean"] is not None:
        return []  # writes to its arguments, which functional graphs do not have
    rest = [S(0) if spec is not None and spec.numel else R for spec in call.outputs[1:]]
    found = [strategy(call, {"input": S(1), **_channels(call)}, (S(1), *rest))]
    if not training:
        found.append(strategy(call, {"input": S(0)}, (S(0), *([R] * len(rest)))))
    return found


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(call: OpCall) -> Sequence[Strategy]:
    names = ("grad_out", "input")
    steps: tuple[Step, ...] = on_contiguous(call, ("save_mean", "save_invstd"))
    found = [strategy(call, {**dict.fromkeys(names, S(1)), **_channels(call)}, (S(1), S(0), S(0)), steps)]
    if not call.bound()["train"]:
        found.append(strategy(call, dict.fromkeys(names, S(0)), (S(0), P, P), steps))
    return found
