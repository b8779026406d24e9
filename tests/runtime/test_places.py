"""Pieces of whole tensors: those of all ranks together are the whole, and each rank's are its part."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import P, S
from commfuse_fx.runtime.memory.layout import dividing, part_of
from commfuse_fx.runtime.memory.places import Place, overlap
from tests.sharding.test_shards import LAYOUTS


def check(place: Place, whole: torch.Tensor, part: torch.Tensor, seen: torch.Tensor) -> None:
    """The part consists of the boxes and of nothing else. `seen` counts elements of the whole tensor."""
    assert place.whole == tuple(whole.shape) and place.part == tuple(part.shape)
    filled = torch.zeros_like(part)
    for box, view in place.boxes_of(filled):
        view.copy_(whole[box.slices])
        seen[box.slices].add_(1)
    assert torch.equal(filled, part)
    assert sum(box.numel for box in place.boxes) == part.numel()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("devices", [None, (3, 1, 0, 2, 7, 6, 5, 4)])
def test_boxes_of_a_layout(layout: Any, devices: Any) -> None:
    mesh = Mesh((2, 2, 2), ("dp", "tp", "pp"), devices)
    whole = torch.arange(12 * 8).reshape(12, 8) + 1
    seen = torch.zeros_like(whole)
    for rank in range(8):
        kept = dividing(layout, mesh)
        check(Place.of_layout(whole.shape, layout, mesh, rank), whole, part_of(whole, kept, mesh, rank), seen)
    assert (seen == seen[0, 0]).all()


def test_runs_of_neighbours_are_one_piece() -> None:
    mesh = Mesh((2,), ("tp",))
    assert len(Place.of_layout((12, 8), (("tp", S(0)),), mesh, 1).boxes) == 1
    assert len(Place.of_layout((12, 8), (("tp", S(0, 3)),), mesh, 1).boxes) == 3
    assert len(Place.of_layout((12, 8), (("tp", S(0, 3)),), Mesh((1,), ("tp",)), 0).boxes) == 1
    with pytest.raises(ValueError, match="partial sum"):
        Place.of_layout((12, 8), (("tp", P),), mesh, 1)


@pytest.mark.parametrize("layout", [(("tp", S(0)),), (("dp,tp", S(0)),), (("dp", S(0)), ("tp", S(0)))], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7])
def test_parts_with_padding(layout: Any, rows: int) -> None:
    """The last ranks may have nothing but padding, which is no box: it would be found where another one begins."""
    mesh, whole = Mesh((2, 3), ("dp", "tp")), torch.arange(2 * rows).reshape(rows, 2) + 1
    seen = torch.zeros_like(whole)
    for rank in range(6):
        place = Place.of_layout(whole.shape, layout, mesh, rank)
        part = part_of(whole, dividing(layout, mesh), mesh, rank)
        assert place.part == tuple(part.shape)
        filled = torch.zeros_like(part)
        for box, view in place.boxes_of(filled):
            assert box.numel
            view.copy_(whole[box.slices])
            seen[box.slices].add_(1)
        assert torch.equal(filled, part)
    assert (seen == seen[0, 0]).all()


@pytest.mark.parametrize("shape", [(), (7,), (13, 5), (3, 4, 5), (2, 3, 1, 4), (5, 1)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_boxes_of_a_flat_range(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(prod(shape)).reshape(shape) + 1
    seen = torch.zeros_like(whole)
    size = -(-whole.numel() // ranks)
    for rank in range(ranks):
        begin, end = min(rank * size, whole.numel()), min((rank + 1) * size, whole.numel())
        place = Place.of_range(shape, begin, end)
        check(place, whole, whole.flatten()[begin:end], seen)
        assert len(place.boxes) <= max(2 * len(shape) - 1, 1)
    assert (seen == 1).all()


def test_every_range_of_a_small_tensor() -> None:
    whole = torch.arange(24).reshape(2, 3, 4)
    for begin in range(25):
        for end in range(begin, 25):
            place = Place.of_range(whole.shape, begin, end)
            check(place, whole, whole.flatten()[begin:end], torch.zeros_like(whole))


def test_what_boxes_have_in_common() -> None:
    box = Place.of_whole((4, 6)).boxes[0]
    assert overlap(box, (2, 1), (2, 2)) == ([slice(2, 4), slice(1, 3)], [slice(0, 2), slice(0, 2)])
    assert overlap(box, (4, 0), (1, 6)) is None
    assert overlap(Place.of_whole(()).boxes[0], (), ()) == ([], [])
