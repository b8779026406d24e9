"""Tensors of a checkpoint: as a rank holds them, and as they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_fx.checkpoints.plain_values import replaced
from commfuse_fx.errors import CheckpointError
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.support.objects import memory_of


@dataclass(frozen=True, eq=False)
class Held:
    """A held tensor is one that a rank has something of.

    tensor: the whole, or this rank's part. place: where that lies in the whole.
    is_own: whether other ranks may have another one, with other values.
    """

    tensor: torch.Tensor
    place: Place
    is_own: bool = False

    @classmethod
    def whole(cls, tensor: torch.Tensor, path: str, is_own: bool) -> Held:
        """A tensor that this rank has as a whole. Raises CheckpointError for one whose values are not all in memory."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise CheckpointError(
                f"{path} is a tensor that a checkpoint cannot hold ({kind}): make it a dense one, or leave it out"
            )
        return cls(tensor.detach(), Place.of_whole(tensor.shape), is_own)

    def digest(self) -> str:
        """The same exactly for tensors of the same type and shape with the same bits."""
        values = self.tensor.cpu().contiguous().resolve_conj().resolve_neg()
        found = hashlib.sha256(f"{self.tensor.dtype} {tuple(self.tensor.shape)}\n".encode())
        found.update(memory_of(values))
        return found.hexdigest()


@dataclass(frozen=True)
class Stored:
    """A stored tensor can be read by its name, as a whole or in part."""

    name: str
    shape: tuple[int, ...]


def filled(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Nested dicts with these tensors, by name, in place of stored ones."""
    return replaced(values, lambda _, each: tensors[each.name] if isinstance(each, Stored) else each)
