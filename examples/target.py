"""A target for the command line, which compiles what such a function returns:

    commfuse lower examples/target.py:make --devices 8 --collectives
    commfuse simulate examples/target.py:make --devices 8 --cluster gloo-1gbit

Tensors that it returns as inputs are examples of shape and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def make() -> tuple[Any, ...]:
    """(model, loss_fn, optimizer, inputs); the last input is the target of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, nn.functional.cross_entropy, optimizer, (torch.randn(32, 256), torch.randint(10, (32,)))
