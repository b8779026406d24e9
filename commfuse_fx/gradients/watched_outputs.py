"""Hooks of outputs that other outputs are computed from: they would see a part of the gradient only.

Why: docs/decisions.md, "Hooks of outputs see the whole gradient, or are refused".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from commfuse_fx.capture.joint import Outputs
from commfuse_fx.errors import CaptureError


@dataclass(frozen=True)
class WatchedOutput:
    """An output of one call, and the numbers of the other outputs that are computed from it."""

    number: int
    tensor: weakref.ref[torch.Tensor]
    others: tuple[int, ...]


def watched_outputs(described: Outputs, outputs: Sequence[torch.Tensor]) -> list[WatchedOutput]:
    """The outputs of a call that other outputs are computed from."""
    return [
        WatchedOutput(number, weakref.ref(outputs[number]), others)
        for number, others in enumerate(described.computed_from)
        if others
    ]


def refuse_partial_gradients(watched: Iterable[WatchedOutput], gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise CaptureError where a hook of an output misses gradients that come through another output."""
    for output in watched:
        tensor = output.tensor()
        if tensor is None or not (tensor._backward_hooks or tensor.retains_grad):
            continue
        other = next((each for each in output.others if gradients[each] is not None), None)
        if other is not None:
            raise CaptureError(
                f"output {output.number} of a compiled module has a hook or retain_grad(), and output {other} is "
                "computed from it inside of the graph: the hook would not see the gradient that comes from there. Call "
                "the model itself (model.module) where you need it, or compile what comes behind as a module of its own"
            )
