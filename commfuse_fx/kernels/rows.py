"""Rows of a tensor that are overwritten, by their numbers."""

from __future__ import annotations

import torch

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define("put_rows_(Tensor(a!) self, Tensor numbers, Tensor rows) -> Tensor(a!)")


def _put_rows_(self: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of a number that occurs several times its first row is taken: on every rank and device the same one."""
    by_number, order = torch.sort(numbers, stable=True)
    first = order.index_select(0, torch.searchsorted(by_number, numbers))
    return self.index_copy_(0, numbers, rows.index_select(0, first))


torch.library.impl("commfuse::put_rows_", "CompositeExplicitAutograd", lib=_library)(_put_rows_)
torch.library.register_fake("commfuse::put_rows_", lambda self, numbers, rows: self, lib=_library)

put_rows_ = torch.ops.commfuse.put_rows_.default
"""(Tensor [n, ...], int64 [k], Tensor [k, ...]) -> the first one, whose rows of these numbers have become those of the
last one. Of equal numbers the first counts."""
