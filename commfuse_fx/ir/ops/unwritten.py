"""Ops whose result is memory that nobody has written yet: what it holds differs from rank to rank and run to run."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_PACKETS = (
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)


def is_unwritten(node: fx.Node) -> bool:
    """Whether the node's result holds nothing that means anything."""
    return getattr(node.target, "overloadpacket", None) in _PACKETS
