"""Refuse a forward that switches the model itself between training and evaluation mode.

Why: docs/decisions.md, "A trace takes back the attributes that a forward sets, and each call makes them".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from commfuse_fx.errors import CaptureError


@contextmanager
def own_mode_kept(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError, and restores the model's own flag, if the code in the block leaves it in another mode.

    The mode decides whether the next call trains, so that call would silently do something else than the user expects.
    Modes of submodules may change: the next call is traced with the modes that it finds.
    """
    before = model.training
    yield
    if model.training != before:
        model.training = before
        name, mode = type(model).__name__, ("training", "eval")[before]
        raise CaptureError(
            f"the forward of {name} leaves {name} itself in {mode} mode, and the mode decides whether a call of the "
            "step trains: switch it outside of the step, or switch only those submodules that need it (a BatchNorm, "
            "say) in forward"
        )
