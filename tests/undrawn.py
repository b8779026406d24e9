"""Models for steps that are compiled and never run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def undrawn(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, with parameters for which no numbers are drawn: of wide layers that takes longer than to compile."""
    with torch.device("meta"):
        model = make()
    return model.to_empty(device="cpu")
