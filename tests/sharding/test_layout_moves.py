"""The cheapest ways between layouts on several mesh axes are those that an exhaustive search of single moves finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import inf, prod
from random import Random

import pytest

from commfuse_fx.ir.core.placement import P, Placement, R, S, Shard, divides, local_shape
from commfuse_fx.machine.presets import preset
from commfuse_fx.sharding.search.layout_moves import cheapest_ways
from commfuse_fx.sharding.search.placement_costs import PlacementCosts

CLUSTER = preset("h100-ib-8")
PLACEMENTS = (R, P, *(S(dim, blocks) for dim in range(3) for blocks in (1, 3)))

Layout = tuple[Placement, ...]


class Grid:
    """Axes of random sizes, of which some have prices together, and a tensor of a random shape."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.ways = [random.choice((2, 4)) for _ in range(random.choice((2, 2, 3)))]
        self.shape = [random.choice((1, 4, 6, 8, 12, 24)) for _ in range(3)]
        self.prices = {}
        for count in range(1, len(self.ways) + 1):
            for places in combinations(range(len(self.ways)), count):
                if count == 1 or random.random() < 0.8:
                    exposed = {"gradients": random.random(), "forward": random.random()}
                    self.prices[places] = PlacementCosts(CLUSTER, self.ranks(places), exposed).of("forward")
        self.fused = random.random() < 0.5
        layouts = [*product(PLACEMENTS, repeat=len(self.ways))]
        self.have = random.sample([each for each in layouts if self.nbytes(each) < inf], 4)
        self.have.append((P,) * len(self.ways))
        self.wanted = [*random.sample(layouts, 16), (S(0),) * len(self.ways)]

    def ranks(self, places: tuple[int, ...]) -> tuple[int, ...]:
        found = [0]
        for place in places:
            stride = prod(self.ways[place + 1 :])
            found = [rank + stride * number for rank in found for number in range(self.ways[place])]
        return tuple(found)

    def nbytes(self, layout: Layout) -> float:
        shape = self.shape
        for ways, placement in zip(self.ways, layout, strict=True):
            if not divides(shape, placement, ways):
                return inf
            shape = list(local_shape(shape, placement, ways))
        return 1e6 / prod(ways for ways, each in zip(self.ways, layout, strict=True) if isinstance(each, Shard))

    def moves(self, layout: Layout, wanted: Layout) -> Iterator[tuple[Layout, float]]:
        """What a layout may become next, and what that takes."""
        for places, prices in self.prices.items():
            first = layout[places[0]]
            others = tuple(R if at in places else each for at, each in enumerate(layout))
            goals = [R] if first != R and all(layout[at] == first for at in places) else []
            if len(places) > 1 and isinstance(first, Shard) and first.blocks > 1:
                goals = []
            if len(places) == 1 and wanted[places[0]] not in (R, first):
                goals.append(wanted[places[0]])
            same, *rest = {wanted[at] for at in places}
            is_sum = not rest and all(layout[at] == P for at in places)
            if len(places) > 1 and is_sum and isinstance(same, Shard) and same.blocks == 1:
                goals.append(same)
            for goal in goals:
                dims = {each.dim for each in (first, goal) if isinstance(each, Shard)}
                later = [each for at, each in enumerate(layout) if at > places[0] and at not in places]
                if not any(isinstance(each, Shard) and each.dim in dims for each in later):
                    after = tuple(goal if at in places else each for at, each in enumerate(layout))
                    if self.nbytes(after) < inf:
                        yield after, prices.change(self.nbytes(others), first, goal, self.fused)

    def cheapest(self, have: Layout, wanted: Layout) -> float:
        seconds = {have: 0.0}
        pending = [have]
        while pending:
            layout = pending.pop()
            for after, more in self.moves(layout, wanted):
                if seconds[layout] + more < seconds.get(after, inf):
                    seconds[after] = seconds[layout] + more
                    pending.append(after)
        return seconds.get(wanted, inf)


@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_of_moves_is_cheaper(seed: int) -> None:
    grid = Grid(seed)
    found = cheapest_ways(grid.have, grid.wanted, grid.prices, grid.nbytes, grid.fused)
    for have, row in zip(grid.have, found.tolist(), strict=True):
        assert row == pytest.approx([grid.cheapest(have, wanted) for wanted in grid.wanted], rel=1e-12)
