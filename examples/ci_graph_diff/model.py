"""The step whose graph is kept: a small MLP, trained by two ranks that exchange gradients."""

from __future__ import annotations

import torch
from torch import nn

import commfuse_fx as cf

RANKS = 2
FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 10, 16


def lowered() -> cf.Lowered:
    """The compiled step of one of `RANKS` ranks. Nothing runs, so one process without a network will do."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    step = cf.compile(
        model,
        loss_fn=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        device_num=RANKS,
    )
    return step.lower(torch.randn(BATCH, FEATURES), torch.zeros(BATCH, dtype=torch.int64))
