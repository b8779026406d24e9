"""Ops for tensors that one rank of a group owns: a sum that this rank alone gets, and what only this rank works on."""

from __future__ import annotations

import torch

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define("reduce(Tensor x, str op, int owner, str group) -> Tensor")
_library.define("reduce_(Tensor(a!) x, str op, int owner, str group) -> Tensor(a!)")
_library.define("of_owner(Tensor(a) x, int owner, int group_size, str group) -> Tensor(a)")


def _of_owner(x: torch.Tensor, owner: int, group_size: int, group: str) -> torch.Tensor:
    """As on the owner: the shapes in a graph are those that it has."""
    return x.view_as(x)


torch.library.impl("commfuse::of_owner", "CompositeExplicitAutograd", lib=_library)(_of_owner)

reduce = torch.ops.commfuse.reduce.default
"""(Tensor, op, owner, group) -> the reduced tensor on the rank at this position of the group; anything on others."""

reduce_ = torch.ops.commfuse.reduce_.default

of_owner = torch.ops.commfuse.of_owner.default
"""(Tensor, owner, size of the group, group) -> the tensor itself on the rank at this position of the group, and none of
its rows on others: an update of such tensors does nothing there, and its states take no memory."""
