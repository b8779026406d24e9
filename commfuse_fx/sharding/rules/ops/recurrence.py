"""Layers of an LSTM on CPUs: by batch.

The sequences are [length, batch, features], whatever the module's `batch_first` is; the states are [batch, features].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.kernels.recurrent import lstm_layer_backward
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.named import on_contiguous, strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


@rule(aten.mkldnn_rnn_layer.default)
def lstm(call: OpCall) -> Sequence[Strategy]:
    """Nobody reads the workspace of a forward pass that is divided."""
    states = ("hx_", "cx_")
    steps = on_contiguous(call, ("input", *states))
    return [strategy(call, {"input": S(1), **dict.fromkeys(states, S(0))}, (S(1), S(0), S(0), R), steps)]


@rule(lstm_layer_backward)
def lstm_backward(call: OpCall) -> Sequence[Strategy]:
    if call.bound()["workspace"] is not None:
        return []
    sequences = ("input", "output", "grad_output")
    states = ("hx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
    placed = {**dict.fromkeys(sequences, S(1)), **dict.fromkeys(states, S(0))}
    return [strategy(call, placed, (S(1), P, P, P, P, S(0), S(0)), on_contiguous(call, (*sequences, *states)))]
