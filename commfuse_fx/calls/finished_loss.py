"""The loss that a step returns: its backward has run, and whoever calls it again is told so."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from commfuse_fx.errors import CommFuseError


def finished(loss: torch.Tensor) -> torch.Tensor:
    """The same tensor, with a `backward` that raises CommFuseError. Files and copies of it hold a plain tensor."""
    held: Any = loss
    held.backward = _refuse
    held.__reduce_ex__ = partial(torch.Tensor.__reduce_ex__, loss.detach())
    return loss


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise CommFuseError(
        "this step has already run the backward; use form='module' to run it yourself: cf.compile(model) without "
        "loss_fn and optimizer. A step needs no loss.backward(): it has run, and the update where there is an optimizer"
    )
