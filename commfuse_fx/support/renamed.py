"""Functions of torch.distributed that have got another name since torch 2.11.

Nothing asks for the version of torch: where a function has another name, both names are looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _either(new: str, old: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


all_gather_single = _either("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
