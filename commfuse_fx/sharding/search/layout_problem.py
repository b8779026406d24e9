"""The search for the cheapest strategies on some groups of mesh axes, as a graph of variables with costs.

A variable is an op with its strategies, or a parameter with its layouts. Between the op that computes a value and the
ops that read it stands the price of the change of layout. A value that several ops read in the same other layout
changes once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from commfuse_fx.ir.core.dependence import is_view, written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.placement import P, Placement, R, S, Shard, divides, divides_in_turn
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.parameter_values import parameter_of
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.sharding.dividing.axis import PROPAGATED, SEARCHED, Axis, Pin
from commfuse_fx.sharding.dividing.choose_strategy import Chooser
from commfuse_fx.sharding.dividing.decisions import Decisions, State
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.dividing.gradient_precision import is_widened, summed_in_float32
from commfuse_fx.sharding.dividing.local_graph import part_over_other_axes
from commfuse_fx.sharding.dividing.own_parts import OwnParts
from commfuse_fx.sharding.dividing.written_inputs import writes_input
from commfuse_fx.sharding.marking.blocks import sections
from commfuse_fx.sharding.marking.layout_op import is_mark
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import strategies_of
from commfuse_fx.sharding.search.axis_grid import TIME, AxisGrid, LaidOut, Objective, PriceOf, distinct, joined, on_axis
from commfuse_fx.sharding.search.byte_count import ByteCount
from commfuse_fx.sharding.search.layout_moves import Placements
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.sharding.search.priced_reads import KnownLayouts, LayoutRead, LayoutReader, price_read
from commfuse_fx.sharding.search.update_costs import update_layouts, update_seconds
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Table

aten = torch.ops.aten


class LayoutProblem:
    """The choices of a step on some axes. `graph` has their costs, in seconds, and `memory` the bytes that they take on
    a rank at the moment when the step would have most of them if nothing were divided: parameters with their states and
    the gradients that are there by then, values that live at that moment, and copies of them in other layouts.

    axes: states that one of them has are fixed, and so are its pins.
    prices: of changes of layout, for each axis.
    known: what other problems of the same compile have found out.
    price_of: the prices of several axes together.
    objective: what counts.
    times: how many times as long as the roofline says a node takes; 1.0 where it is not among them.
    all_axes: these axes among others, in the order in which they divide. What is pinned on the others has to fit, too.
    """

    def __init__(
        self,
        program: Program,
        axes: Sequence[Axis],
        prices: Sequence[PlacementCosts],
        device: Device,
        known: KnownLayouts | None = None,
        price_of: PriceOf | None = None,
        objective: Objective = TIME,
        times: Mapping[fx.Node, float] | None = None,
        all_axes: Sequence[Axis] = (),
    ) -> None:
        self.program = program
        self._all_axes = all_axes or axes
        self._times = times or {}
        self._known = KnownLayouts() if known is None else known
        self.grid = AxisGrid(axes, prices, device, price_of, objective.work)
        self._moved = objective.moved
        self._marked: dict[fx.Node, None] = {}  # parameters that a mark divides, and views of them
        self._cut: dict[fx.Node, list[Placements]] = {}  # parts of inputs over other axes
        self.graph = FactorGraph()
        self.memory = FactorGraph()
        self.states: list[list[LaidOut]] = []
        self.named: dict[str, int] = {}  # name of a node -> its variable
        self.parameters: dict[str, int] = {}
        self._at: dict[fx.Node, tuple[int, int | None]] = {}  # node -> variable, and which result of it
        self._reads: dict[tuple[int, int], LayoutRead] = {}
        self._own = [OwnParts(program, axis.group, axis.ways) for axis in axes]
        self._chooser = Chooser({node: Value(info(node).spec) for node in program.graph.nodes}, axes[0].ways)
        self._zeros: dict[int, Table] = {}  # by how many
        self.blocks = self._blocks()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._variable(node, [self._given(self.grid.whole)])
            elif node.op == "call_function":
                self._call(node)
        self._results()
        for read in self._reads.values():
            self._price(read)
        ByteCount(program, self.grid, self.memory, self.states).count(self.parameters, self._at, self._reads)

    def decisions(self, choice: Sequence[int]) -> dict[str, Decisions]:
        """What a choice of states means, by the group of an axis."""
        found: dict[str, Decisions] = {}
        chosen = [states[number] for states, number in zip(self.states, choice, strict=True)]
        for at, axis in enumerate(self.grid.axes):
            parameters = {name: chosen[number].outputs[0][at] for name, number in self.parameters.items()}
            states = {name: on_axis(chosen[number], at) for name, number in self.named.items()}
            found[axis.group] = Decisions(parameters, states, self.blocks)
        return found

    @property
    def parts(self) -> list[NDArray[np.intp]]:
        """Of each variable, what each state is on each axis: numbers, as [axes, states]."""
        known: dict[int, NDArray[np.intp]] = {}
        for states in self.states:
            if id(states) not in known:
                numbers: list[dict[State, int]] = [{} for _ in self.grid.axes]
                rows = [
                    [own.setdefault(on_axis(each, at), len(own)) for each in states] for at, own in enumerate(numbers)
                ]
                known[id(states)] = np.array(rows)
        return [known[id(states)] for states in self.states]

    # Variables

    def _variable(self, node: fx.Node | None, states: list[LaidOut], costs: Table | None = None) -> int:
        zeros = self._zeros.setdefault(len(states), np.zeros(len(states)))
        number = self.graph.variable(zeros if costs is None else costs)
        self.memory.variable(zeros)
        self.states.append(self._known.states(states))
        if node is not None:
            self._at[node] = (number, None)
        return number

    @staticmethod
    def _given(*outputs: Placements) -> LaidOut:
        return LaidOut(outputs, ())

    def _blocks(self) -> tuple[int, ...]:
        found = {1: None}
        for node, source in self.program.sources.items():
            if source.kind == "parameter":
                found |= {sections(node, dim): None for dim in range(len(tensor_spec(node).shape))}
        pins = [pin for axis in self.grid.axes for pin in (*axis.parameters.values(), *axis.activations.values())]
        found |= {pin.placement.blocks: None for pin in pins if isinstance(pin.placement, Shard)}
        return tuple(sorted(found))

    def _placeholder(self, node: fx.Node) -> None:
        source = self.program.sources[node]
        if source.kind == "input":
            lies = [tuple(axis.inputs.get(source.name, R) for axis in self.grid.axes)]
            if lies != [self.grid.whole] and not self.grid.axes[0].local_inputs:
                lies = [*product(*(dict.fromkeys((each, R)) for each in lies[0]))]  # the whole is there as well
                if (part := part_over_other_axes(node)) is not None:  # it is cut further
                    self._cut[part] = lies
                    lies = [self.grid.whole]
            self._variable(node, [self._given(each) for each in lies])
        elif source.kind == "parameter":
            choices = (self._of_parameter(axis, node, source.name) for axis in self.grid.axes)
            pins = {axis.group: axis.parameters.get(source.name) for axis in self._all_axes}
            found = [each for each in product(*choices) if self._fits(tensor_spec(node), each, pins)]
            updated = update_layouts(self.program, source.name, found, self.grid)
            costs = update_seconds(self.program, source.name, found, updated, self.grid, self._known)
            states = [LaidOut((one,), (other,)) for one, other in zip(found, updated, strict=True)]
            number = self._variable(node, states, costs)
            self.parameters[source.name] = number
            if any(_is_marked(axis, source.name) for axis in self.grid.axes):
                self._marked[node] = None
        else:
            self._variable(node, [self._given(self.grid.whole)])

    def _of_parameter(self, axis: Axis, node: fx.Node, name: str) -> list[Placement]:
        pin = axis.parameters.get(name)
        if pin is not None:
            return [pin.placement]
        if self.program.params[name].shares:
            return [R]
        shape = tensor_spec(node).shape
        parts: dict[Placement, None] = {}
        for dim in range(len(shape)):
            inside = S(dim, sections(node, dim))
            parts |= dict.fromkeys(each for each in (inside, S(dim)) if divides(shape, each, axis.ways))
        return [R, *parts]

    def _call(self, node: fx.Node) -> None:
        spec = info(node).spec
        args: tuple[Any, ...] = node.args
        if node.target is operator.getitem and isinstance(info(args[0]).spec, tuple):
            self._at[node] = (self._at[args[0]][0], args[1])
        elif writes_input(node):
            pass
        elif node in self._cut:
            self._variable(node, [self._given(each) for each in self._cut[node]])
        elif is_mark(node):
            self._mark(node)
        elif is_widened(node):
            self._at[node] = self._at[args[0]]
        elif node.target is aten.ones_like.default and tensor_spec(node).numel == 1:
            self._variable(node, [self._given(self.grid.whole)])
        elif spec is None or written_nodes(node):
            self._whole_inputs(node)
        else:
            self._op(node)

    def _fits(self, spec: TensorSpec, placements: Placements, pins: Mapping[str, Pin | None]) -> bool:
        """Whether a tensor can lie so on the axes of the search, with what is pinned on others."""
        lies = {group: R if pin is None else pin.placement for group, pin in pins.items()}
        lies |= {axis.group: each for axis, each in zip(self.grid.axes, placements, strict=True)}
        return divides_in_turn(spec.shape, ((lies[axis.group], axis.ways) for axis in self._all_axes))

    def _mark(self, node: fx.Node) -> None:
        spec = tensor_spec(node)
        choices: list[list[Placement]] = []
        for axis, own in zip(self.grid.axes, self._own, strict=True):
            pin = Pin(R, "cross_batch") if node in own else axis.activations.get(info(node).name)
            parts = (S(dim, blocks) for dim in range(len(spec.shape)) for blocks in self.blocks)
            free: list[Placement] = [R, *(each for each in parts if divides(spec.shape, each, axis.ways))]
            free += [P] if spec.dtype.is_floating_point else []
            fixed = axis.states.get(info(node).name)
            free = free if fixed is None else [*fixed.outputs]
            choices.append(free if pin is None else [pin.placement])
        pins = {axis.group: axis.activations.get(info(node).name) for axis in self._all_axes}
        states = [LaidOut((each,), (each,)) for each in product(*choices) if self._fits(spec, each, pins)]
        number = self._variable(node, states)
        self.named[info(node).name] = number
        self._reading(number, info(node).phase, node.all_input_nodes)

    def _whole_inputs(self, node: fx.Node) -> None:
        """An op that takes and gives whole tensors."""
        given = [value for value in node.all_input_nodes if isinstance(info(value).spec, TensorSpec)]
        spec = info(node).spec
        count = len(spec) if isinstance(spec, tuple) else 1
        state = LaidOut((self.grid.whole,) * count, (self.grid.whole,) * len(given))
        number = self._variable(node, [state])
        self._reading(number, info(node).phase, given)

    def _op(self, node: fx.Node) -> None:
        described = self._chooser.describe(node, self.blocks)
        if is_view(node) and all(value in self._marked for value in described.inputs):
            self._marked[node] = None
        calls = [replace(described.call, ways=axis.ways) for axis in self.grid.axes]
        own = tuple(each.strategy(node, call) for each, call in zip(self._own, calls, strict=True))
        fixed = tuple(axis.states.get(info(node).name) for axis in self.grid.axes)
        times = self._times.get(node, 1.0)
        key: Any = (self.grid.key_of(node, described.call), own, fixed, times)
        try:
            known = self._known.calls.get(key)
        except TypeError:  # an argument that has no hash
            key, known = None, None
        if known is None:
            by_axis = [
                _strategies(call, state) if settled is None else [settled]
                for call, settled, state in zip(calls, own, fixed, strict=True)
            ]
            together = [each for each in product(*by_axis) if self.grid.all_fit(described.call, each)]
            states = self._known.states([joined(each) for each in together])
            known = states, np.array([self.grid.seconds_of(node, described.call, each, times) for each in together])
            if key is not None:
                self._known.calls[key] = known
        number = self._variable(node, *known)
        if not any(own):
            self.named[info(node).name] = number
        self._reading(number, info(node).phase, described.inputs)

    # Who reads what

    def _reading(
        self, variable: int, phase: str, values: Sequence[fx.Node], part: str = "inputs", fused: bool = False
    ) -> None:
        """A variable reads these values in this phase: with the placements of its inputs, or as its outputs lie."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, value in enumerate(values):
            number, item = self._at[value]
            key = (number, item or 0)
            places.setdefault(key, []).append(place)
            if key not in self._reads and isinstance(spec := info(value).spec, TensorSpec):
                times = self._moved if value in self._marked else 1.0
                self._reads[key] = LayoutRead(*key, spec, [], times, parameter_of(self.program, value) is not None)
        for key, own in places.items():
            if key in self._reads:
                needs = self._known.columns(self.states[variable], part, tuple(own))
                self._reads[key].readers.append(LayoutReader(variable, needs, phase, fused))

    def _results(self) -> None:
        """What the step returns is whole. A gradient lies as the update takes it, and what is written to an input as
        that."""
        program = self.program
        for name, grad in program.grads.items():
            number, spec = self.parameters[name], tensor_spec(grad)
            self._reading(number, "update", [grad], fused=True)
            if summed_in_float32(spec, program):
                variable, item = self._at[grad]
                self._reads[variable, item or 0].spec = spec.with_dtype(torch.float32)
        returned = list(dict.fromkeys((program.loss, *program.aux.values())))
        last = self._variable(None, [LaidOut((), (self.grid.whole,) * len(returned))])
        self._reading(last, "update", returned)
        for node in program.graph.nodes:
            if writes_input(node):
                target, given = node.args[:2]
                number, _ = self._at[target]
                self._reading(number, info(node).phase, [given], "outputs")

    # Prices

    def _price(self, read: LayoutRead) -> None:
        have = self._known.columns(self.states[read.variable], "outputs", (read.item,))
        priced = price_read(read, have, self.grid, self._known)
        for reader, table in zip(read.readers, priced.own, strict=True):
            self.graph.pair(read.variable, reader.variable, table)
        for change in priced.shared:
            needs: dict[int, NDArray[np.bool_]] = {}
            for number, needed in change.readers:
                variable = read.readers[number].variable
                needs[variable] = needed | needs[variable] if variable in needs else needed
            self.graph.pay_once(read.variable, change.paid, needs)
            if change.stays is not None:
                self.memory.pay_once(read.variable, change.stays, needs)


def _is_marked(axis: Axis, name: str) -> bool:
    """Whether a mark divides a parameter on this axis."""
    pin = axis.parameters.get(name)
    return pin is not None and isinstance(pin.placement, Shard) and pin.where not in (PROPAGATED, SEARCHED)


def _strategies(call: OpCall, fixed: State | None) -> list[Strategy]:
    """The strategies of a call on one axis. fixed: the only one, if the call has it; None: there is a choice."""
    found = distinct(strategies_of(call))
    return [each for each in found if State(each.outputs, each.inputs) == fixed] or found
