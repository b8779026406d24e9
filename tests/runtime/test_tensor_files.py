"""Shares of ranks in a checkpoint, and tensors that are read in other parts than they were written in."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from commfuse_fx.checkpoints.checkpoint_index import CheckpointIndex
from commfuse_fx.checkpoints.held import Held
from commfuse_fx.checkpoints.shares import Report, Shares, Write, share
from commfuse_fx.checkpoints.tensor_reader import read_parts
from commfuse_fx.checkpoints.tensor_writer import write_metadata, write_share
from commfuse_fx.errors import CheckpointError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.runtime.memory.places import Place

MESH = Mesh((2, 2), ("dp", "tp"))

PLACES: dict[str, Any] = {
    "whole": lambda shape, rank: Place.of_whole(shape),
    "rows": lambda shape, rank: Place.of_layout(shape, (("tp", S(0)),), MESH, rank),
    "columns": lambda shape, rank: Place.of_layout(shape, (("dp,tp", S(1)),), MESH, rank),
    "blocks": lambda shape, rank: Place.of_layout(shape, (("dp", R), ("tp", S(0, 3))), MESH, rank),
    "both": lambda shape, rank: Place.of_layout(shape, (("dp", S(1)), ("tp", S(0, 3))), MESH, rank),
    "flat": lambda shape, rank: Place.of_range(shape, *flat_range(prod(shape), rank, 4)),
    "uneven": lambda shape, rank: Place.of_range(shape, *flat_range(prod(shape), min(rank, 2), 3)),
}


def flat_range(size: int, rank: int, ranks: int) -> tuple[int, int]:
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def part_at(whole: torch.Tensor, place: Place) -> torch.Tensor:
    part = torch.empty(place.part, dtype=whole.dtype)
    for box, view in place.boxes_of(part):
        view.copy_(whole[box.slices])
    return part


def write(folder: Path, ranks: list[dict[str, Held]]) -> tuple[CheckpointIndex, Shares]:
    shares = share([{path: Report.of(held) for path, held in each.items()} for each in ranks])
    written = [write_share(folder, shares, rank, tensors(each, shares.writes[rank])) for rank, each in enumerate(ranks)]
    index = CheckpointIndex(
        torch="",
        world=len(ranks),
        tensors=write_metadata(folder, shares, written),
        files={name: found for each in written for name, found in each.files.items()},
        values=None,
        ranks=[{"values": None, "tensors": names} for names in shares.names],
    )
    return CheckpointIndex.from_json(index.to_json()), shares


def tensors(held: dict[str, Held], writes: Any) -> dict[Write, torch.Tensor]:
    found = {}
    for each in writes:
        views = held[each.path].place.boxes_of(held[each.path].tensor)
        found[each] = next(view for box, view in views if box.offsets == each.offsets)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("read", PLACES)
@pytest.mark.parametrize("written", PLACES)
def test_parts_are_read_in_other_parts(tmp_path: Path, written: str, read: str) -> None:
    whole = torch.arange(12 * 8, dtype=torch.float64).reshape(12, 8) + 1
    places = [PLACES[written](whole.shape, rank) for rank in range(4)]
    index, _ = write(tmp_path, [{"x": Held(part_at(whole, place), place)} for place in places])
    for rank in range(4):
        place = PLACES[read](whole.shape, rank)
        assert torch.equal(read_parts(tmp_path, index, {"x": place})["x"], part_at(whole, place))
    other = {"x": torch.zeros(12, 8, dtype=torch.float64)}
    dcp.load(other, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(other["x"], whole)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int8], ids=str)
def test_tensors_of_all_kinds(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    held = Held.whole(torch.ones(shape).to(dtype), "x", is_own=True)
    index, _ = write(tmp_path, [{"x": held}])
    (found,) = read_parts(tmp_path, index, {"x": Place.of_whole(shape)}).values()
    assert found.dtype == dtype and torch.equal(found, held.tensor)


def test_a_tensor_in_another_order_of_dimensions(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)[:, :, 1:]
    index, _ = write(tmp_path, [{"x": Held.whole(tensor, "x", is_own=False)}])
    assert torch.equal(read_parts(tmp_path, index, {"x": Place.of_whole(tensor.shape)})["x"], tensor)


def test_replicated_tensors_are_written_once_and_ranks_write_as_much() -> None:
    whole = {f"p{number}": torch.zeros(number + 1, 16) for number in range(20)}
    ranks = [{name: Held.whole(each, name, is_own=False) for name, each in whole.items()} for _ in range(4)]
    shares = share([{path: Report.of(held) for path, held in each.items()} for each in ranks])
    nbytes = [sum(4 * prod(each.sizes) for each in writes) for writes in shares.writes]
    assert sorted(each.entry for writes in shares.writes for each in writes) == sorted(whole)
    assert sum(nbytes) == sum(each.nbytes for each in whole.values()) and max(nbytes) <= 1.1 * min(nbytes)


def test_parts_stay_with_who_alone_has_them() -> None:
    places = [PLACES["rows"]((8, 4), rank) for rank in range(4)]
    held = [{"x": Held(torch.zeros(4, 4), each)} for each in places]
    shares = share([{path: Report.of(each) for path, each in rank.items()} for rank in held])
    assert [len(writes) for writes in shares.writes] == [1, 1, 0, 0]
    assert [each.offsets for writes in shares.writes for each in writes] == [(0, 0), (4, 0)]


def test_what_each_rank_has_of_its_own(tmp_path: Path) -> None:
    values = [1.0, 2.0, 1.0, 2.0]
    ranks = [{"x": Held.whole(torch.full((3,), value), "x", is_own=True)} for value in values]
    index, shares = write(tmp_path, ranks)
    assert sorted(index.tensors) == ["x", "x@1"]
    assert [dict(each) for each in shares.names] == [{}, {"x": "x@1"}, {}, {"x": "x@1"}]
    for rank, value in enumerate(values):
        name = index.of_rank(rank, 4)[1].get("x", "x")
        assert read_parts(tmp_path, index, {name: Place.of_whole((3,))})[name].tolist() == [value] * 3
    assert index.of_rank(1, 2)[1] == {}


def test_ranks_that_hold_other_tensors() -> None:
    one, other = ({"x": Report.of(Held.whole(torch.zeros(size), "x", is_own=False))} for size in (3, 4))
    with pytest.raises(CheckpointError, match=r"ranks have different tensors as x: float32\[3\], and float32\[4\] on"):
        share([one, other])
    with pytest.raises(CheckpointError, match="the ranks hold 48 elements of x, which has 96"):
        share([{"x": Report.of(Held(torch.zeros(6, 8), PLACES["rows"]((12, 8), 0)))}])


@pytest.mark.parametrize("damage", ["byte", "cut", "longer", "gone", "empty"])
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    index, _ = write(tmp_path, [{"x": Held.whole(torch.randn(100), "x", is_own=False)}])
    file = tmp_path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 1
    changed = {"cut": content[:-7], "longer": content + b"x", "empty": b""}.get(damage, content)
    file.write_bytes(changed)
    if damage == "gone":
        file.unlink()
    said = {"byte": "has other bytes than", "gone": "is missing: copy the whole folder"}.get(
        damage, "bytes in place of"
    )
    with pytest.raises(CheckpointError, match=said):
        read_parts(tmp_path, index, {"x": Place.of_whole((100,))})


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    index, _ = write(tmp_path, [{"x": Held.whole(torch.ones(2), "x", is_own=False)}])
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert read_parts(tmp_path, index, {"x": Place.of_whole((2,))})["x"].tolist() == [1, 1]
