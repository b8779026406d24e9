"""Shapes of ops that torch cannot tell without data, or refuses to: wherever ops run on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_impls

aten = torch.ops.aten


@contextmanager
def known_shapes() -> Iterator[None]:
    """Let fake tensors know them."""
    with patch.dict(fake_impls.op_implementations_dict, _SHAPES):
        yield


def _ctc_loss_shapes(
    mode: Any, func: Any, log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: list[int], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of aten::_ctc_loss, which torch calls dynamic although lists of lengths decide them."""
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * max(lengths, default=0) + 1)


def _grouped_mm_shape(
    mode: Any, func: Any, a: torch.Tensor, b: torch.Tensor, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Of aten::_grouped_mm on a CPU, which takes more dtypes there than torch's own rule allows."""
    if a.device.type != "cpu":
        return NotImplemented
    groups = [offsets.shape[0]] if a.ndim == b.ndim == 2 else [a.shape[0]] if a.ndim == b.ndim == 3 else []
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype)


_SHAPES = {aten._ctc_loss.default: _ctc_loss_shapes, aten._grouped_mm.default: _grouped_mm_shape}
