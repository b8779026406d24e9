"""Give a part of a larger block of memory a storage of its own.

`torch.save`, `copy.deepcopy`, pickling and safetensors work on storages. For a view they save the whole block, and two
views of one block look like tied tensors to them. So the tensors that users see have storages that cover only their
own bytes.
"""

from __future__ import annotations

import torch

from commfuse_fx.ir.core.meta import TensorSpec


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides as a dense `view`, in a storage that begins and ends with it.

    The new storage keeps the memory alive, even if the block's own tensor is gone. It cannot be resized.
    """
    # DLPack hands over an address and its owner instead of a storage. These are torch.utils.dlpack's functions without
    # what they check: a module has a gradient for each parameter in every step.
    own: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(view))
    if own.stride() != view.stride():  # DLPack may rewrite strides of dimensions of size 1
        own = own.as_strided(view.shape, view.stride())
    return own


def has_aliases(tensor: torch.Tensor) -> bool:
    """Whether other tensors use this tensor's storage: a view, `.data`, an entry of a state_dict, a numpy array."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > OWN_USERS


OWN_USERS = 2
"""What holds a storage that nobody else uses: its tensor, and the handle that asks for the count."""


def separated(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of its own. Returns `tensor` itself if it fills its storage or has gaps."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or tensor.numel() == 0:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    # The first question is the cheap one: this runs for every gradient of a step that leaves them in `.grad`.
    return with_own_storage(tensor) if tensor.is_contiguous() or TensorSpec.of(tensor).is_dense else tensor
