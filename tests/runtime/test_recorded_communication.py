"""Steps whose communication is measured run without a graph, and from it again afterwards."""

from __future__ import annotations

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from tests.recorders import recorded


def test_a_captured_step_is_measured_without_its_graph() -> None:
    model = nn.Linear(2, 1)
    step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW(model.parameters()))
    recorder, batch = recorded(step), (torch.ones(3, 2), torch.ones(3, 1))
    for _ in range(FIRST + 1):
        step(*batch)
    assert recorder.replays == [1]
    with step.record_communication() as timeline:
        step(*batch)
    assert recorder.replays == [1] and len(timeline.steps) == 1
    step(*batch)
    assert recorder.replays == [2]
