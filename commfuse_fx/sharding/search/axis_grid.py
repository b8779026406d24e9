"""Some groups of mesh axes together: how tensors can lie on them, and what ops and changes of layout cost there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf, prod
from typing import Any

import numpy as np
from torch import fx

from commfuse_fx.cost.roofline import flops_and_bytes, is_free, seconds_of_work
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.placement import R, Shard, divides_in_turn
from commfuse_fx.ir.ops.redistribution import exchange_parts, gather_parts, sum_and_divide, sum_partial
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.dividing.decisions import State
from commfuse_fx.sharding.rules.writing.call import AllReduce, OpCall, Strategy
from commfuse_fx.sharding.search.layout_moves import Placements, cheapest_ways
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.solvers.strategies.factor_graph import Table


@dataclass(frozen=True)
class Objective:
    """What a search counts.

    work: how many times the time of compute counts, that of updates as well.
    moved: how many times the bytes of a parameter count that a mark divides, where they are gathered.
    """

    work: float = 1.0
    moved: float = 1.0


TIME = Objective()
"""The time of a step."""

PriceOf = Callable[[str], PlacementCosts]
"""The prices of a group of axes, written as in "dp,tp"."""

COLLECTIVES: dict[Any, str] = {
    sum_partial: "all_reduce",
    sum_and_divide: "reduce_scatter",
    gather_parts: "all_gather",
    exchange_parts: "all_to_all",
}


@dataclass(frozen=True)
class LaidOut:
    """A state of a variable: the placements of an op's results and of its tensor inputs."""

    outputs: tuple[Placements, ...]
    inputs: tuple[Placements, ...]


class AxisGrid:
    """The axes of a search. Placements are one per axis, in their order.

    prices: of changes of layout, for each axis. device: what a rank computes with.
    price_of: the prices of several axes together, and of others. None: each change is on one axis.
    work: how many times the time of compute counts.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        prices: Sequence[PlacementCosts],
        device: Device,
        price_of: PriceOf | None = None,
        work: float = 1.0,
    ) -> None:
        self.axes = axes
        self.device = device
        self.work = work
        self.whole: Placements = (R,) * len(axes)
        self._prices = prices
        self._price_of = price_of
        self._kinds: dict[str, AxisGrid] = {}
        self._together: dict[tuple[int, ...], PlacementCosts] = {(at,): each for at, each in enumerate(prices)}
        if price_of is not None:
            for number in range(2, len(axes) + 1):
                for places in combinations(range(len(axes)), number):
                    self._together[places] = price_of(",".join(axes[at].group for at in places))

    def key(self, fused: bool = False) -> tuple[object, ...]:
        """What prices of changes depend on in one cluster. fused: those of collectives that are sent with others."""
        return tuple((axis.ways, *prices.key(fused)) for axis, prices in zip(self.axes, self._prices, strict=True))

    def of(self, kind: str) -> AxisGrid:
        """The same with the prices of collectives of this kind."""
        if kind not in self._kinds:
            grid = copy(self)
            grid._prices = [each.of(kind) for each in self._prices]
            grid._together = {places: each.of(kind) for places, each in self._together.items()}
            self._kinds[kind] = grid
        return self._kinds[kind]

    def fits(self, spec: TensorSpec, placements: Placements) -> bool:
        """Whether a tensor can lie so on all axes together."""
        return divides_in_turn(spec.shape, zip(placements, (axis.ways for axis in self.axes), strict=True))

    def parts(self, placements: Placements) -> int:
        """Of how many parts of a tensor a rank has one."""
        return prod(axis.ways for axis, each in zip(self.axes, placements, strict=True) if isinstance(each, Shard))

    def all_fit(self, call: OpCall, strategies: Sequence[Strategy]) -> bool:
        """Whether all tensors of a call can lie as these strategies say, one per axis."""
        if len(strategies) == 1:
            return True
        state = joined(strategies)
        pairs = (*zip(call.inputs, state.inputs, strict=True), *zip(call.outputs, state.outputs, strict=True))
        return all(spec is None or self.fits(spec, placements) for spec, placements in pairs)

    def seconds_of(self, node: fx.Node, call: OpCall, strategies: Sequence[Strategy], times: float = 1.0) -> float:
        """What every rank computes and sends in an op. call: that of the node, on whole tensors. times: how many times
        as long as the roofline says computing takes."""
        sent = 0.0
        for prices, strategy in zip(self._prices, strategies, strict=True):
            sums = sum(isinstance(step, AllReduce) for step in strategy.steps)
            sent += prices.seconds("all_reduce", strategy.comm // (2 * sums)) * sums if sums and strategy.comm else 0.0
        state = joined(strategies)
        sent += self._on_other_axes(node, call, state)
        if is_free(node):
            return sent
        flops, nbytes = flops_and_bytes(node)
        whole = sum(spec.nbytes for spec in (*call.inputs, *call.outputs) if spec is not None)
        share = self.bytes_of(node, call, state) / whole if whole else 1.0
        seconds = seconds_of_work(node, flops / self.workers(strategies), nbytes * share, self.device)
        return seconds * times * self.work + sent

    def key_of(self, node: fx.Node, call: OpCall) -> tuple[object, ...]:
        """What `seconds_of` depends on in one cluster, besides strategies and times. call: that of the node."""
        other, fused = self._prices_of(node, call), bool(info(node).serves)
        return self.work, self.key(), call, None if other is None else (other.key(fused), fused)

    def _prices_of(self, node: fx.Node, call: OpCall) -> PlacementCosts | None:
        """The prices of a collective that dividing over other axes has added; None where the node is none."""
        if node.target not in COLLECTIVES or self._price_of is None:
            return None
        assert isinstance(call.args[1], str)
        return self._price_of(call.args[1])

    def _on_other_axes(self, node: fx.Node, call: OpCall, state: LaidOut) -> float:
        """What such a collective sends: a rank's parts on these axes."""
        prices = self._prices_of(node, call)
        if prices is None:
            return 0.0
        kind = COLLECTIVES[node.target]
        specs, placements = (call.outputs, state.outputs) if kind == "all_gather" else (call.inputs, state.inputs)
        assert specs[0] is not None
        return prices.seconds(kind, specs[0].nbytes / self.parts(placements[0]), bool(info(node).serves))

    def bytes_of(self, node: fx.Node, call: OpCall, state: LaidOut, counts: Sequence[bool] = ()) -> float:
        """Bytes of the parts of tensors that an op works on, on a rank. call: that of the node, on whole tensors.

        counts: which of its inputs count; (): all.
        """
        if is_free(node):
            return 0.0
        taken = [*(counts or (True,) * len(call.inputs)), *(True for _ in call.outputs)]
        pairs = zip((*call.inputs, *call.outputs), (*state.inputs, *state.outputs), taken, strict=True)
        return sum(spec.nbytes / self.parts(placements) for spec, placements, is_taken in pairs if spec and is_taken)

    def workers(self, strategies: Sequence[Strategy]) -> int:
        """Among how many ranks the work of an op is divided."""
        return prod(
            axis.ways
            for axis, each in zip(self.axes, strategies, strict=True)
            if any(placement != R for placement in (*each.inputs, *each.outputs))
        )

    def changes(self, spec: TensorSpec, have: Sequence[Placements], wanted: Sequence[Placements], fused: bool) -> Table:
        """Seconds of changes from each layout to each of others, by the cheapest sequences of moves; infinity where
        there is none."""
        if len(self.axes) > 1:
            return cheapest_ways(have, wanted, self._together, partial(self._nbytes_of, spec), fused)
        prices = self._prices[0]
        rows = [[prices.change(spec.nbytes, one, other, fused) for (other,) in wanted] for (one,) in have]
        return np.where([self.fits(spec, other) for other in wanted], rows, inf)

    def _nbytes_of(self, spec: TensorSpec, placements: Placements) -> float:
        """Bytes of a part; infinity if the tensor cannot lie so."""
        return spec.nbytes / self.parts(placements) if self.fits(spec, placements) else inf


def joined(strategies: Sequence[Strategy]) -> LaidOut:
    """The state of an op that takes these strategies, one per axis."""
    outputs = tuple(zip(*(each.outputs for each in strategies), strict=True))
    return LaidOut(outputs, tuple(zip(*(each.inputs for each in strategies), strict=True)))


def distinct(strategies: Sequence[Strategy]) -> list[Strategy]:
    """The first strategy with each combination of placements."""
    found: dict[Any, Strategy] = {}
    for each in strategies:
        found.setdefault((each.outputs, each.inputs), each)
    return list(found.values())


def on_axis(state: LaidOut, at: int) -> State:
    """A state on one of the axes."""
    return State(tuple(each[at] for each in state.outputs), tuple(each[at] for each in state.inputs))
