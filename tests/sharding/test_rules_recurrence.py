"""Layers of an LSTM in single precision are divided by batch, and learn as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.kernels.recurrent import lstm_layer_backward
from commfuse_fx.sharding.rules.prove import check_call, describe
from commfuse_fx.sharding.rules.writing.call import call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.models import Batch, Case
from tests.sharding.divided_oracle import compare, no_marks
from tests.sharding.layers import WAYS, aten, made


@WAYS
@pytest.mark.parametrize("batch_first", [False, True])
def test_by_batch(ways: int, batch_first: bool) -> None:
    x, output = (made(3, 4, width, dtype=torch.float32) for width in (5, 6))
    weights = [made(24, 5, dtype=torch.float32), made(24, 6, dtype=torch.float32), *[made(24, dtype=torch.float32)] * 2]
    states = [made(4, 6, seed=seed, dtype=torch.float32) for seed in (1, 2)]
    forward = [x, *weights, *states, False, [], 2, 6, 1, True, False, batch_first, True]
    with torch.no_grad():
        found = aten.mkldnn_rnn_layer.default(*forward)[:3]
    grads = [output, states[1], None]
    backward = [x, *weights, *states, *found, *grads, False, 2, 6, 1, True, True, False, [], batch_first, None]
    for target, args, wanted in (
        (aten.mkldnn_rnn_layer.default, forward, "S(1), R, R, R, R, S(0), S(0) -> S(1), S(0), S(0), R"),
        (lstm_layer_backward, backward, "S(1), S(0) -> S(1), P, P, P, P, S(0), S(0)"),
    ):
        with torch.no_grad():
            call, tensors = call_of(target, args, None, ways)
            assert any(describe(strategy).endswith(wanted) for strategy in compute_strategies(call)), target
            assert not check_call(call, tensors, 1e-5, 1e-6)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].mean(1))


class SinglePrecision(Case):
    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return super().model(dtype)

    def batches(self, count: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
        return super().batches(count, rows, dtype)


def test_a_model_is_divided_by_batch() -> None:
    case = SinglePrecision("tagger", Tagger, lambda rows: (torch.randn(rows, 4, 6), torch.randint(5, (rows,))))
    found = compare(case, (2,), no_marks, steps=2, tolerance=1e-5)
    layers = [node for node in found.program.graph.nodes if op_label(node.target) == "mkldnn_rnn_layer"]
    assert [info(node).spec[0].shape for node in layers] == [(4, 4, 8)] * 4
