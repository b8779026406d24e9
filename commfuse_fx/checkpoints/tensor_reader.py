"""Parts of tensors in files that torch.distributed.checkpoint has written, read by it.

Its `.metadata` is a pickle, which may run anything. So the index says what the files hold, and tensors are loaded with
`weights_only`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from commfuse_fx.checkpoints.checkpoint_index import CheckpointIndex, StoredBox
from commfuse_fx.checkpoints.checksums import check_file
from commfuse_fx.errors import CheckpointError
from commfuse_fx.runtime.memory.places import Place, overlap


@dataclass(frozen=True)
class _Where:
    """Where a box lies, as FileSystemReader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Parts(LoadPlanner):
    """Reads each box of the files once, and copies it to wherever something of it is wanted."""

    def __init__(self, index: CheckpointIndex, places: Mapping[str, Place]) -> None:
        self._index = index
        self._places = places
        for name in places:  # before there is memory for as many
            tensor = index.tensors[name]
            full = [box for box in tensor.boxes if prod(box.sizes)]
            is_told_twice = len({box.offsets for box in full}) < len(full)
            if is_told_twice or sum(prod(box.sizes) for box in full) != prod(tensor.shape):
                raise CheckpointError(f"what the index says of {name} does not cover it: take another checkpoint")
        self.found = {
            name: torch.zeros(place.part, dtype=index.tensors[name].dtype, device="cpu")
            for name, place in places.items()
        }
        self._left = {name: sum(box.numel for box in place.boxes) for name, place in places.items()}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: all is known."""

    def boxes(self) -> list[tuple[str, StoredBox]]:
        """The boxes of the files of which something is wanted, by the names of their tensors."""
        return [
            (name, box)
            for name, place in self._places.items()
            for box in self._index.tensors[name].boxes
            if any(overlap(each, box.offsets, box.sizes) is not None for each in place.boxes)
        ]

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, box in self.boxes():
            index, zeros = MetadataIndex(name, box.offsets), torch.Size([0] * len(box.sizes))
            items.append(ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size(box.sizes)))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is no tensor in these files")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the box goes: into the tensor that is wanted if that has it as it is, or else beside it."""
        name = read_item.storage_index.fqn
        view = self._view(read_item)
        return self.found[name].new_empty(read_item.lengths) if view is None else view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name, offsets = read_item.storage_index.fqn, tuple(read_item.storage_index.offset or ())
        is_there = self._view(read_item) is not None
        for box, view in self._places[name].boxes_of(self.found[name]):
            common = overlap(box, offsets, read_item.lengths)
            if common is not None:
                mine, theirs = common
                if not is_there:
                    view[tuple(mine)].copy_(tensor[tuple(theirs)])
                self._left[name] -= view[tuple(mine)].numel()

    def _view(self, read_item: ReadItem) -> torch.Tensor | None:
        name, offsets = read_item.storage_index.fqn, tuple(read_item.storage_index.offset or ())
        for box, view in self._places[name].boxes_of(self.found[name]):
            if (box.offsets, box.sizes) == (offsets, tuple(read_item.lengths)):
                return view
        return None

    def check(self) -> None:
        """Raises CheckpointError if the files do not have all that is wanted."""
        for name, left in self._left.items():
            if left:
                raise CheckpointError(f"the files have {left} elements of {name} too few or too many")


def read_parts(folder: Path, index: CheckpointIndex, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """The parts of tensors that lie at these places, by the names of the tensors. They are on the host.

    Raises CheckpointError for files that are damaged or missing, and OSError.
    """
    planner = _Parts(index, places)
    for name in dict.fromkeys(box.file for _, box in planner.boxes()):
        check_file(folder / name, index.files[name])
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(_metadata(index), True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(plan, planner).wait()
    except OSError:
        raise
    except Exception as error:  # whatever unpacking finds wrong
        raise CheckpointError(
            f"the files in {str(folder)!r} are not what its index says: take another checkpoint. "
            f"[{type(error).__name__}: {error}]"
        ) from error
    planner.check()
    return planner.found


def _metadata(index: CheckpointIndex) -> Metadata:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _Where] = {}
    for name, each in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in each.boxes]
        tensors[name] = TensorStorageMetadata(TensorProperties(each.dtype), torch.Size(each.shape), chunks)
        for box in each.boxes:
            places[MetadataIndex(name, box.offsets)] = _Where(box.file, box.at, box.length)
    return Metadata(tensors, storage_data=places)
