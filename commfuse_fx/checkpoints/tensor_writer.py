"""A rank's share of tensors in files, written by torch.distributed.checkpoint, whose tools read them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from commfuse_fx.checkpoints.checkpoint_index import StoredBox, StoredTensor
from commfuse_fx.checkpoints.checksums import checksum
from commfuse_fx.checkpoints.shares import Shares, Write


class _Writer(FileSystemWriter):
    """Writes files that do not name the folder in which they were made."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Share(SavePlanner):
    """One rank's share: what it writes has been agreed before."""

    def __init__(self, shares: Shares, rank: int, tensors: Mapping[Write, torch.Tensor]) -> None:
        self._shares = shares
        self._rank = rank
        self._tensors = {(write.entry, write.offsets): tensor for write, tensor in tensors.items()}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: all is known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(each, self._shares) for each in self._shares.writes[self._rank]])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        index = write_item.index
        return self._tensors[index.fqn, tuple(index.offset or ())]


@dataclass(frozen=True)
class Written:
    """What a rank has written: an entry for each box of its share, and for each file its size and CRC-32."""

    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


def write_share(folder: Path, shares: Shares, rank: int, tensors: Mapping[Write, torch.Tensor]) -> Written:
    """Write a rank's share into a folder that is there. Raises OSError."""
    writer = _Writer(folder)
    planner = _Share(shares, rank, tensors)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    try:
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # after which torch.save found its own file incomplete
            raise error.__context__ from None
        raise
    files = dict.fromkeys(each.storage_data.relative_path for each in results)
    return Written(results, {name: checksum(folder / name) for name in files})


def write_metadata(folder: Path, shares: Shares, written: Sequence[Written]) -> dict[str, StoredTensor]:
    """Write `.metadata`, when all ranks have written their shares. Returns where each tensor lies. Raises OSError."""
    plans = [_Share(shares, rank, {}).create_local_plan() for rank in range(len(written))]
    _, metadata = create_default_global_save_plan(plans)
    writer = _Writer(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [each.results for each in written])
    sizes = {(each.entry, each.offsets): each.sizes for writes in shares.writes for each in writes}
    boxes: dict[str, list[StoredBox]] = {entry: [] for entry in shares.entries}
    for result in (result for each in written for result in each.results):
        entry, offsets, where = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
        box = StoredBox(offsets, sizes[entry, offsets], where.relative_path, where.offset, where.length)
        boxes[entry].append(box)
    return {
        entry: StoredTensor(report.shape, getattr(torch, report.dtype), tuple(boxes[entry]))
        for entry, report in shares.entries.items()
    }


def _write_item(write: Write, shares: Shares) -> WriteItem:
    report, sizes = shares.entries[write.entry], torch.Size(write.sizes)
    chunk = ChunkStorageMetadata(torch.Size(write.offsets), sizes)
    properties = TensorProperties(getattr(torch, report.dtype))
    return WriteItem(
        MetadataIndex(write.entry, write.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(report.shape)),
    )
