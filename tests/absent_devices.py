"""Devices that this PyTorch cannot have."""

from __future__ import annotations

from typing import Any

import torch


def leave_unseeded() -> None:
    """From now on `torch.manual_seed` passes them by: for each it takes the stack, and most tests seed often."""
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device._is_compiled():
            device.manual_seed_all = _no_device


def _no_device(seed: int) -> None:
    pass
