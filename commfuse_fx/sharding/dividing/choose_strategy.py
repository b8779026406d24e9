"""Choose the strategy of a node: the one that sends the fewest bytes, given the placements of its inputs.

Why: docs/decisions.md, "`semi_auto` decides op by op, in order".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.placement import P, Partial, Placement, R, Shard
from commfuse_fx.sharding.dividing.decisions import State
from commfuse_fx.sharding.dividing.divided_value import FREE, Cost, Value
from commfuse_fx.sharding.rules.writing.call import Number, OpCall, Ref, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import strategies_of


@dataclass(frozen=True)
class Described:
    """A node's call in the form that rules take, on tensors that are whole on this group of axes.

    inputs: the nodes of its tensors, in order. numbers: nodes that compute other arguments.
    """

    call: OpCall
    inputs: list[fx.Node]
    numbers: list[fx.Node]


class Chooser:
    """Chooses strategies for nodes among `ways` ranks. `values`: the values of all nodes before the present one."""

    def __init__(self, values: Mapping[fx.Node, Value], ways: int) -> None:
        self.values = values
        self.ways = ways
        self._making: dict[tuple[fx.Node, Placement], tuple[Described, Strategy] | None] = {}

    def describe(self, node: fx.Node, blocks: tuple[int, ...] = ()) -> Described:
        """The call of a node. blocks: the numbers that rules are asked about; by default those of its inputs."""
        inputs: list[fx.Node] = []
        specs: list[TensorSpec] = []
        numbers: list[fx.Node] = []

        def take(value: Any) -> Any:
            if isinstance(value, fx.Node):
                spec = self.values[value].whole
                if isinstance(spec, TensorSpec):
                    inputs.append(value)
                    specs.append(spec)
                    return Ref(len(inputs) - 1)
                numbers.append(value)
                return Number(len(numbers) - 1)
            if isinstance(value, (list, tuple)):
                return tuple(take(item) for item in value)
            return value

        args = tuple(take(arg) for arg in node.args)
        kwargs = tuple((name, take(value)) for name, value in node.kwargs.items())
        spec = info(node).spec
        outputs: tuple[Any, ...] = spec if isinstance(spec, tuple) else (spec,)
        if not blocks:
            blocks = tuple(sorted({1, *(n for value in inputs for n in self._blocks_in(self.values[value]))}))
        call = OpCall(node.target, args, kwargs, tuple(specs), outputs, self.ways, blocks)
        return Described(call, inputs, numbers)

    def _blocks_in(self, value: Value) -> list[int]:
        """The numbers of blocks in which a dimension of the value is divided, or could be."""
        if value.pending is None or value.pending.op == "placeholder":
            return [placement.blocks for placement in value.versions if isinstance(placement, Shard)]
        return self._blocks_in(self.values[value.pending.all_input_nodes[0]])

    def fixed(self, described: Described, state: State) -> Strategy | None:
        """The strategy with these placements, if the op has it and its inputs can lie so."""
        values = [self.values[value] for value in described.inputs]
        if len(values) != len(state.inputs) or any(
            self.cost(value, placement) is None for value, placement in zip(values, state.inputs, strict=True)
        ):
            return None
        found = (each for each in strategies_of(described.call) if each.outputs == state.outputs)
        return next((each for each in found if each.inputs == state.inputs), None)

    def choose(self, node: fx.Node, described: Described) -> Strategy:
        """The cheapest strategy of a node.

        In the forward the first criterion is the bytes that are sent now and later, where a partial sum is sent later
        when it is summed. In the backward it is the bytes that are sent now. Then come the bytes that are cut out of
        whole tensors, and the order in which the rule gives its strategies.
        """
        call, inputs = described.call, described.inputs
        values = [self.values[value] for value in inputs]
        if all(value.is_whole for value in values):
            return strategies_of(call)[0]
        forward = info(node).phase == "forward"
        best: tuple[Any, Strategy] | None = None
        for number, strategy in enumerate(strategies_of(call)):
            sent, cut = strategy.comm, 0
            for given, value, placement in zip(inputs, values, strategy.inputs, strict=True):
                cost = self.cost(value, placement)
                if cost is None or (placement == P and P in value.versions and len(given.users) > 1):
                    break  # a partial sum that several ops use is summed once, before them
                sent += cost[0]
                cut += cost[1]
            else:
                # A partial sum is a debt: a later node has to sum it. In the backward the debt does not count, since
                # gradients are reduced anyway. An input that is a partial sum already has this debt before the op.
                owed = [R if P not in value.versions else p for value, p in zip(values, strategy.inputs, strict=True)]
                debt = _debt(call.outputs, strategy.outputs) - _debt(call.inputs, owed)
                rank = (sent + debt if forward else sent, cut, sent, debt, number)
                if best is None or rank < best[0]:
                    best = rank, strategy
        assert best is not None, "every op can work on whole tensors"
        return best[1]

    def cost(self, value: Value, wanted: Placement) -> Cost | None:
        """The cost of having a value with the placement `wanted`; None if that is impossible."""
        if value.made_by is not None:
            return FREE if self.making(value, wanted) is not None else value.transition(R, wanted, self.ways)
        if value.pending is None:
            found = value.nearest(wanted, self.ways)
            return None if found is None else found[0]
        option = self.option(value, wanted)
        return None if option is None else option[0]

    def making(self, value: Value, wanted: Placement) -> tuple[Described, Strategy] | None:
        """How a value that is computed of constants is computed with the placement `wanted`; None if it has to be cut
        out of the whole value."""
        node = value.made_by
        assert node is not None
        if (node, wanted) not in self._making:
            described = self.describe(node, (1, wanted.blocks) if isinstance(wanted, Shard) else (1,))
            inputs = [self.values[given] for given in described.inputs]
            found = (
                each
                for each in strategies_of(described.call)
                if each.outputs == (wanted,) and not isinstance(wanted, Partial) and not each.comm
                if all(self.cost(of, lies) is not None for of, lies in zip(inputs, each.inputs, strict=True))
            )
            strategy = next(found, None)
            self._making[node, wanted] = None if strategy is None else (described, strategy)
        return self._making[node, wanted]

    def option(self, value: Value, wanted: Placement) -> tuple[Cost, Strategy | None] | None:
        """The cost and the strategy with which an undecided value gets the placement `wanted`; None if it cannot."""
        node = value.pending
        assert node is not None
        if node.op == "placeholder":
            possible = not isinstance(wanted, Partial) and value.transition(R, wanted, self.ways) is not None
            return (FREE, None) if possible else None
        described = self.describe(node)
        best: tuple[Cost, Strategy | None] | None = None
        for strategy in strategies_of(described.call):
            if strategy.outputs == (wanted,):
                cost = self.cost(self.values[described.inputs[0]], strategy.inputs[0])
                if cost is not None and (best is None or cost < best[0]):
                    best = cost, strategy
        return best


def _debt(specs: Sequence[TensorSpec | None], placements: Sequence[Placement]) -> int:
    """Bytes that summing these partial sums will send."""
    return sum(2 * spec.nbytes for spec, p in zip(specs, placements, strict=True) if p == P and spec is not None)
