"""Parts of a larger block of memory as tensors with a storage of their own.

`torch.save`, `copy.deepcopy`, pickling, safetensors and whatever looks for tensors that share memory work on storages.
Of a view they keep the whole block, and two views of one block look tied to them. So what the user is shown of a block
has a storage that covers its own bytes and nothing else.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from commfuse_fx.ir.meta import TensorSpec


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides as a dense `view`, in a storage that begins and ends with it.

    The new storage keeps the memory alive, so it may outlive the block that the view was made of. It cannot be resized.
    """
    # DLPack is the exchange of memory between frameworks: it hands over an address and its owner, not a storage.
    own: torch.Tensor = from_dlpack(to_dlpack(view))
    if own.stride() != view.stride():  # DLPack may rewrite strides of dimensions of size 1
        own = own.as_strided(view.shape, view.stride())
    return own


def has_aliases(tensor: torch.Tensor) -> bool:
    """Whether other tensors use its storage: a view, `.data`, what `state_dict()` returned, an array of numpy."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > _OWN_USERS


_OWN_USERS = 2  # the tensor, and the handle to ask with


def separated(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of its own; `tensor` itself if it is alone in its storage, or has gaps."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or tensor.numel() == 0:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    # The first question is the cheap one: this runs for every gradient of a step that leaves them in `.grad`.
    return with_own_storage(tensor) if tensor.is_contiguous() or TensorSpec.of(tensor).is_dense else tensor
