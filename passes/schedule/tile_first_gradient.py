"""Compute the first large gradient of a step in tiles of its rows, so that the first rows leave early.

Until the first gradient is there the wire has nothing to carry. At the head of a language model that is a matrix of
millions of elements, which takes as long as a layer of the backward. Its rows do not depend on each other: a product
of matrices is computed tile by tile, and each tile may be sent as a piece of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from commfuse_fx.cost.model import profile_key
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import tables_of
from commfuse_fx.ir.core.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation
from commfuse_fx.solvers.buckets.pieces import FIRST_PIECE

MOST_TILES = 4
"""Three quarters of the time are gained; more tiles gain little, and each is a call more."""

LEAST_SECONDS = 1e-3
"""What a tile takes at least."""

UNIT = 64
"""Tiles begin at multiples of so many rows, and the last one is not smaller than the others. On CPUs a row then comes
out with the same bits, whichever rows are computed along with it (compared for 1080 products: f32, f64 and bf16, one
thread and two)."""


@dataclass(frozen=True)
class TileFirstGradient(PricedPass):
    """Bitwise neutral. Only on CPUs: elsewhere libraries choose other kernels for other numbers of rows."""

    name = "tile_first_gradient"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("flat",)

    @classmethod
    def when(cls, situation: Situation) -> TileFirstGradient | None:
        return cls() if situation.by_cost and situation.schedules else None

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        place = {node: i for i, node in enumerate(program.graph.nodes)}
        large = [
            (place[write], start, write)
            for start in program.collectives()
            if tables_of(start) is None  # the rows of a gradient are dealt out among ranks otherwise
            for write, _ in info(start).writes
            if tensor_spec(write).nbytes >= FIRST_PIECE
        ]
        if not large:
            return False
        _, start, write = min(large)
        product = _product(write)
        if product is None or tensor_spec(product).device != "cpu":
            return False
        spec = tensor_spec(product)
        tiles = min(
            MOST_TILES,
            spec.nbytes // FIRST_PIECE,
            int(context.costs.compute_seconds(product) / LEAST_SECONDS),
            spec.shape[0] // UNIT,
        )
        if tiles < 2:
            return False
        rows = spec.shape[0] // tiles // UNIT * UNIT
        _Tiling(program, start, write, product, [*range(0, rows * tiles, rows), spec.shape[0]]).run()
        return True


def _product(write: fx.Node) -> fx.Node | None:
    """The product of matrices that a gradient is: written into its place, or copied there as it is."""
    if write.target is aten.mm.out:
        return write
    if write.target is not aten.copy_.default:
        return None
    place, value = write.args
    if not isinstance(place, fx.Node) or not isinstance(value, fx.Node) or value.target is not aten.mm.default:
        return None
    one, other = tensor_spec(place), tensor_spec(value)
    return value if one == other and one.is_contiguous else None


class _Tiling:
    """Replaces one product, and the write that brings it into its bucket, by tiles of both.

    cuts: the first row of each tile, and the number of rows.
    """

    def __init__(self, program: Program, start: fx.Node, write: fx.Node, product: fx.Node, cuts: list[int]) -> None:
        self.program = program
        self.build = Builder(program)
        self.start = start
        self.write = write
        self.product = product
        self.cuts = cuts
        self.spec = tensor_spec(product)

    def run(self) -> None:
        place = self.write.kwargs["out"] if self.write is self.product else self.write.args[0]
        assert isinstance(place, fx.Node)
        storage, _, _, offset = place.args
        with self.build.before(self.product):
            whole = None if self.write is self.product else self._whole()
            tiles = [self._tile(begin, end, storage, offset, whole) for begin, end in pairwise(self.cuts)]
        self._replace_write(tiles)
        if whole is not None:
            self.product.replace_all_uses_with(whole)
        for node in dict.fromkeys((self.write, place, self.product)):
            self.program.graph.erase_node(node)

    def _whole(self) -> fx.Node:
        """The memory of a product that others read as well: its bucket's is already on the wire by then."""
        kwargs = {"dtype": self.spec.dtype, "device": torch.device(self.spec.device)}
        like, name = info(self.product), f"{info(self.product).name}.tiles"
        return self.build.call(
            aten.empty.memory_format, (list(self.spec.shape),), kwargs, spec=self.spec, like=like, name=name
        )

    def _tile(self, begin: int, end: int, storage: Any, offset: Any, whole: fx.Node | None) -> fx.Node:
        """Computes these rows, and returns the node that brings them into the bucket."""
        like, build = info(self.product), self.build
        left, right = self.product.args[:2]
        assert isinstance(left, fx.Node)
        width = self.spec.shape[1]
        spec = self.spec.with_shape((end - begin, width))
        label = f"{info(self.write).name}.rows.{begin}"
        given = tensor_spec(left)
        given = replace(given, shape=(end - begin, given.shape[1]))
        some = build.call(aten.slice.Tensor, (left, 0, begin, end), spec=given, like=like, name=f"{label}/of")
        into = storage if whole is None else whole
        at = (offset if whole is None else 0) + begin * width
        out = build.strided(into, spec, at, f"{label}/out", phase=like.phase)
        part = (end - begin) / self.spec.shape[0]
        name = label if whole is None else f"{label}/mm"
        key = profile_key(self.product)
        made = build.call(
            aten.mm.out, (some, right), {"out": out}, spec=spec, like=like, name=name, origin=key, share=part
        )
        if whole is None:
            return made
        place = build.strided(storage, spec, offset + begin * width, f"{label}/place", phase=like.phase)
        return build.call(aten.copy_.default, (place, made), spec=spec, like=info(self.write), name=label)

    def _replace_write(self, tiles: list[fx.Node]) -> None:
        details, width = info(self.start), self.spec.shape[1]
        writes: list[tuple[fx.Node, Stretch]] = []
        for write, stretch in details.writes:
            if write is not self.write:
                writes.append((write, stretch))
                continue
            bounds = [stretch.begin + row * width for row in self.cuts[:-1]] + [stretch.end]
            writes += [(tile, Stretch(*ends)) for tile, ends in zip(tiles, pairwise(bounds), strict=True)]
        details.writes = tuple(writes)
