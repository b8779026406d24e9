"""Which rank writes what: everything once, and each rank about as many bytes as the others.

Why: docs/decisions.md, "What ranks hold alike is written once, unless they began differently".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from commfuse_fx.checkpoints.held import Held
from commfuse_fx.errors import CheckpointError

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """A report is what a rank tells of one tensor that it holds something of.

    dtype: its name, such as "float32". boxes: (offsets, sizes) of what the rank holds of it.
    digest: of a tensor that may be another one on other ranks; ranks with one digest have the same. "" for others.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Offsets, tuple[int, ...]], ...]
    digest: str = ""

    @classmethod
    def of(cls, held: Held) -> Report:
        boxes = tuple((box.offsets, box.sizes) for box in held.place.boxes)
        dtype = str(held.tensor.dtype).removeprefix("torch.")
        return cls(held.place.whole, dtype, boxes, held.digest() if held.is_own else "")


@dataclass(frozen=True)
class Write:
    """A box of a tensor that one rank writes. path: under which the rank reported it. entry: its name in the files."""

    entry: str
    path: str
    offsets: Offsets
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """The shares of all ranks in a checkpoint.

    entries: each tensor of the files by its name, with shape and dtype.
    names: for each rank the names of its tensors, by path, where they differ from the path.
    writes: what each rank writes.
    """

    entries: Mapping[str, Report]
    names: Sequence[Mapping[str, str]]
    writes: Sequence[Sequence[Write]]


def share(reports: Sequence[Mapping[str, Report]]) -> Shares:
    """The shares that follow from the reports of all ranks, by path. All ranks come to the same.

    Raises CheckpointError where ranks hold tensors of other shapes, or not all of a tensor between them.
    """
    entries: dict[str, Report] = {}
    names: list[dict[str, str]] = [{} for _ in reports]
    holders: dict[Write, list[int]] = {}
    first: dict[tuple[str, str], str] = {}  # the entry of each path and digest
    for rank, reported in enumerate(reports):
        for path, report in reported.items():
            entry = first.setdefault(
                (path, report.digest), path if rank == 0 or not report.digest else f"{path}@{rank}"
            )
            known = entries.setdefault(entry, report)
            if (known.shape, known.dtype) != (report.shape, report.dtype):
                raise CheckpointError(
                    f"ranks have different tensors as {path}: {known.dtype}{list(known.shape)}, and "
                    f"{report.dtype}{list(report.shape)} on rank {rank}; build the same model on every rank"
                )
            if entry != path:
                names[rank][path] = entry
            for offsets, sizes in report.boxes:
                holders.setdefault(Write(entry, path, offsets, sizes), []).append(rank)
    _check_complete(entries, holders)
    return Shares(entries, names, _assigned(entries, holders, len(reports)))


def _check_complete(entries: Mapping[str, Report], boxes: Mapping[Write, object]) -> None:
    held, places = dict.fromkeys(entries, 0), dict.fromkeys((box.entry, box.offsets) for box in boxes)
    for box in boxes:
        held[box.entry] += prod(box.sizes)
    for entry, report in entries.items():
        if held[entry] != prod(report.shape) or len(places) != len(boxes):
            raise CheckpointError(
                f"the ranks hold {held[entry]} elements of {entry}, which has {prod(report.shape)}: this is a bug of "
                "commfuse-fx; step.state_dict() gives whole tensors"
            )


def _assigned(entries: Mapping[str, Report], holders: Mapping[Write, Sequence[int]], ranks: int) -> list[list[Write]]:
    """Each box to the rank with the fewest bytes among those that hold it, the largest box first."""
    sizes = {entry: getattr(torch, report.dtype).itemsize for entry, report in entries.items()}
    nbytes = {box: prod(box.sizes) * sizes[box.entry] for box in holders}
    loads, found = [0] * ranks, [list[Write]() for _ in range(ranks)]
    for box in sorted(holders, key=lambda each: (len(holders[each]) > 1, -nbytes[each])):
        rank = min(holders[box], key=lambda each: loads[each])
        loads[rank] += nbytes[box]
        found[rank].append(box)
    return found
