"""Refuse that a model reads where in its memory an input, parameter or buffer begins: other calls begin elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.errors import CaptureError
from commfuse_fx.support.user_lines import is_library

_read = torch.Tensor.storage_offset


def storage_offsets_refused(given: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Inside the `with` block, `storage_offset()` of a tensor in the memory of one of these raises CaptureError where
    the user's code calls it."""
    memory = [tensor.untyped_storage()._cdata for tensor in given]

    def storage_offset(tensor: torch.Tensor) -> Any:
        caller = sys._getframe(2).f_code.co_filename
        if not is_library(caller) and tensor.untyped_storage()._cdata in memory:
            raise CaptureError(
                "storage_offset() of a parameter, buffer or input would be the same number in all later calls: take a "
                "slice, or call as_strided() without an offset, which begins where the tensor does"
            )
        return _read(tensor)

    return patched_here(torch.Tensor, "storage_offset", storage_offset)
