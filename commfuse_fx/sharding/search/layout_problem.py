"""The search for the cheapest strategies on some groups of mesh axes, as a graph of variables with costs.

A variable is an op with its strategies, or a parameter with its layouts. Between the op that computes a value and the
ops that read it stands the price of the change of layout. A value that several ops read in the same other layout
changes once: each such change is a chain of variables of its own, which says whether any of them needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch
from torch import fx

from commfuse_fx.cost.roofline import is_free
from commfuse_fx.ir.dependence import written_nodes
from commfuse_fx.ir.meta import TensorSpec, info
from commfuse_fx.ir.placement import P, Placement, R, S, Shard, divides
from commfuse_fx.ir.program import Program
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.dividing.choose_strategy import Chooser, Described
from commfuse_fx.sharding.dividing.decisions import Decisions
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.dividing.written_inputs import writes_input
from commfuse_fx.sharding.marking.blocks import sections
from commfuse_fx.sharding.marking.layout_op import is_mark
from commfuse_fx.sharding.rules.rule_registry import strategies_of
from commfuse_fx.sharding.search.axis_grid import AxisGrid, LaidOut, Placements, distinct, joined, on_axis
from commfuse_fx.sharding.search.kept_bytes import copies, kept_for_backward
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.solvers.factor_graph import FactorGraph, Table

aten = torch.ops.aten


@dataclass
class _Reader:
    """Who reads a value: a variable, and the placements in which each of its states needs it. phase: when it does."""

    variable: int
    wanted: Sequence[tuple[Placements, ...]]
    phase: str
    fused: bool = False


@dataclass
class _Read:
    """A value: result number `item` of a variable, with those who read it."""

    variable: int
    item: int
    spec: TensorSpec
    readers: list[_Reader] = field(default_factory=list)


class LayoutProblem:
    """The choices of a step on some axes. `graph` has their costs, in seconds, and `memory` the bytes that they take on
    a rank: what stays, which is parameters with their gradients and states and what the forward leaves for the
    backward, and of what else an op works on all that exceeds what the largest op needs at the least.

    prices: of changes of layout, for each axis.
    update_bytes: bytes that an update reads and writes per byte of a parameter.
    """

    def __init__(
        self,
        program: Program,
        axes: Sequence[Axis],
        prices: Sequence[PlacementCosts],
        device: Device,
        update_bytes: float,
    ) -> None:
        self.program = program
        self.grid = AxisGrid(axes, prices, device)
        self.graph = FactorGraph()
        self.memory = FactorGraph()
        self.states: list[list[LaidOut]] = []
        self.named: dict[str, int] = {}  # name of a node -> its variable
        self.parameters: dict[str, int] = {}
        self._update_bytes = update_bytes
        self._at: dict[fx.Node, tuple[int, int | None]] = {}  # node -> variable, and which result of it
        self._reads: dict[tuple[int, int], _Read] = {}
        self._chooser = Chooser({node: Value(info(node).spec) for node in program.graph.nodes}, axes[0].ways)
        self._known_changes: dict[Any, Table] = {}
        self._known_pairs: dict[Any, Table] = {}
        self._known_calls: dict[Any, tuple[list[LaidOut], Table]] = {}
        self._described: dict[int, tuple[fx.Node, Described]] = {}  # variable -> the op
        self._known_states: dict[tuple[LaidOut, ...], list[LaidOut]] = {}
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
        kept = [node for node in kept_for_backward(program) if node in self._at]
        for node in kept:
            number, item = self._at[node]
            self._stays(number, item or 0, _spec(node).nbytes)
        self._work_in_small_parts(dict.fromkeys(self._at[node] for node in kept))

    def decisions(self, choice: Sequence[int]) -> dict[str, Decisions]:
        """What a choice of states means, by the group of an axis."""
        found: dict[str, Decisions] = {}
        chosen = [states[number] for states, number in zip(self.states, choice, strict=True)]
        for at, axis in enumerate(self.grid.axes):
            parameters = {name: chosen[number].outputs[0][at] for name, number in self.parameters.items()}
            states = {name: on_axis(chosen[number], at) for name, number in self.named.items()}
            found[axis.group] = Decisions(parameters, states, self.blocks)
        return found

    # Variables

    def _variable(self, node: fx.Node | None, states: list[LaidOut], costs: Table | None = None) -> int:
        number = self.graph.variable(np.zeros(len(states)) if costs is None else costs)
        self.memory.variable(np.zeros(len(states)))
        self.states.append(self._known_states.setdefault(tuple(states), states))
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
                found |= {sections(node, dim): None for dim in range(len(_spec(node).shape))}
        pins = [pin for axis in self.grid.axes for pin in (*axis.parameters.values(), *axis.activations.values())]
        found |= {pin.placement.blocks: None for pin in pins if isinstance(pin.placement, Shard)}
        return tuple(sorted(found))

    def _placeholder(self, node: fx.Node) -> None:
        source = self.program.sources[node]
        if source.kind == "input":
            self._variable(node, [self._given(tuple(axis.inputs.get(source.name, R) for axis in self.grid.axes))])
        elif source.kind == "parameter":
            choices = (self._of_parameter(axis, node, source.name) for axis in self.grid.axes)
            found = [each for each in product(*choices) if self.grid.fits(_spec(node), each)]
            seconds = self._update_bytes * _spec(node).nbytes / self.grid.device.memory_bandwidth
            costs = np.array([seconds / self.grid.parts(each) for each in found])
            number = self._variable(node, [self._given(each) for each in found], costs)
            self.parameters[source.name] = number
            self._stays(number, 0, copies(self.program, source.name) * _spec(node).nbytes)
        else:
            self._variable(node, [self._given(self.grid.whole)])

    def _of_parameter(self, axis: Axis, node: fx.Node, name: str) -> list[Placement]:
        pin = axis.parameters.get(name)
        if pin is not None:
            return [pin.placement]
        if self.program.params[name].shares:
            return [R]
        shape = _spec(node).shape
        parts: dict[Placement, None] = {}
        for dim in range(len(shape)):
            inside = S(dim, sections(node, dim))
            parts |= dict.fromkeys(each for each in (inside, S(dim)) if divides(shape, each, axis.ways))
        return [R, *parts]

    def _call(self, node: fx.Node) -> None:
        spec = info(node).spec
        if node.target is operator.getitem and isinstance(info(node.args[0]).spec, tuple):  # type: ignore[arg-type]
            parent, item = node.args
            self._at[node] = (self._at[parent][0], item)  # type: ignore[index, assignment]
        elif writes_input(node):
            pass
        elif is_mark(node):
            self._mark(node)
        elif node.target is aten.ones_like.default and _spec(node).numel == 1:
            self._variable(node, [self._given(self.grid.whole)])
        elif spec is None or written_nodes(node):
            self._whole_inputs(node)
        else:
            self._op(node)

    def _mark(self, node: fx.Node) -> None:
        spec = _spec(node)
        choices: list[list[Placement]] = []
        for axis in self.grid.axes:
            pin = axis.activations.get(info(node).name)
            parts = (S(dim, blocks) for dim in range(len(spec.shape)) for blocks in self.blocks)
            free: list[Placement] = [R, *(each for each in parts if divides(spec.shape, each, axis.ways))]
            free += [P] if spec.dtype.is_floating_point else []
            choices.append(free if pin is None else [pin.placement])
        states = [LaidOut((each,), (each,)) for each in product(*choices) if self.grid.fits(spec, each)]
        number = self._variable(node, states)
        self.named[info(node).name] = number
        self._reading(number, info(node).phase, [node.args[0]], [each.inputs for each in states])  # type: ignore[list-item]

    def _whole_inputs(self, node: fx.Node) -> None:
        """An op that takes and gives whole tensors."""
        given = [value for value in node.all_input_nodes if isinstance(info(value).spec, TensorSpec)]
        spec = info(node).spec
        count = len(spec) if isinstance(spec, tuple) else 1
        state = LaidOut((self.grid.whole,) * count, (self.grid.whole,) * len(given))
        number = self._variable(node, [state])
        self._reading(number, info(node).phase, given, [state.inputs])

    def _op(self, node: fx.Node) -> None:
        described = self._chooser.describe(node, self.blocks)
        key: Any = (described.call, info(node).phase)
        try:
            known = self._known_calls.get(key)
        except TypeError:  # an argument that has no hash
            key, known = None, None
        if known is None:
            by_axis = [distinct(strategies_of(replace(described.call, ways=axis.ways))) for axis in self.grid.axes]
            together = [each for each in product(*by_axis) if self.grid.all_fit(described.call, each)]
            states = [joined(each) for each in together]
            known = states, np.array([self.grid.seconds_of(node, described.call, each) for each in together])
            if key is not None:
                self._known_calls[key] = known
        number = self._variable(node, *known)
        self._described[number] = node, described
        self.named[info(node).name] = number
        self._reading(number, info(node).phase, described.inputs, [state.inputs for state in known[0]])

    # Who reads what

    def _reading(
        self,
        variable: int,
        phase: str,
        values: Sequence[fx.Node],
        wanted: Sequence[Sequence[Placements]],
        fused: bool = False,
    ) -> None:
        """A variable reads these values in this phase, in each state with these placements."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, value in enumerate(values):
            number, item = self._at[value]
            places.setdefault((number, item or 0), []).append(place)
            spec = info(value).spec
            if isinstance(spec, TensorSpec):
                self._reads.setdefault((number, item or 0), _Read(number, item or 0, spec))
        for key, own in places.items():
            if key in self._reads:
                needs = tuple(tuple(dict.fromkeys(state[place] for place in own)) for state in wanted)
                self._reads[key].readers.append(_Reader(variable, needs, phase, fused))

    def _results(self) -> None:
        """What the step returns is whole. A gradient lies as its parameter, and so does what is written to an input."""
        program = self.program
        for name, grad in program.grads.items():
            number = self.parameters[name]
            self._reading(number, "update", [grad], [each.outputs for each in self.states[number]], fused=True)
        returned = list(dict.fromkeys((program.loss, *program.aux.values())))
        last = self._variable(None, [self._given(self.grid.whole)])
        self._reading(last, "update", returned, [(self.grid.whole,) * len(returned)])
        for node in program.graph.nodes:
            if writes_input(node):
                target, given = node.args[:2]
                number, _ = self._at[target]
                self._reading(number, info(node).phase, [given], [each.outputs for each in self.states[number]])

    # Prices

    def _price(self, read: _Read) -> None:
        states = self.states[read.variable]
        have = tuple(state.outputs[read.item] for state in states)
        wanted = dict.fromkeys(each for reader in read.readers for needs in reader.wanted for each in needs)
        fused = all(reader.fused for reader in read.readers)
        changes = {each: self._changes(read.spec, have, each, fused) for each in wanted}
        shared: dict[Placements, None] = {}
        if len(read.readers) > 1:
            counts = dict.fromkeys(wanted, 0)
            for reader in read.readers:
                for each in dict.fromkeys(each for needs in reader.wanted for each in needs):
                    counts[each] += 1
            shared = {
                each: None
                for each, costs in changes.items()
                if counts[each] > 1 and (costs[np.isfinite(costs)] > 0).any()
            }
        for reader in read.readers:
            key = (read.spec, have, reader.wanted, fused, tuple(shared))
            table = self._known_pairs.get(key)
            if table is None:
                columns = [self._own(changes, shared, needs, len(have)) for needs in reader.wanted]
                table = self._known_pairs[key] = np.stack(columns, axis=1)
            self.graph.pair(read.variable, reader.variable, table)
        for each in shared:
            self._share(read, each, changes[each])

    def _changes(self, spec: TensorSpec, have: tuple[Placements, ...], wanted: Placements, fused: bool) -> Table:
        key = (spec, have, wanted, fused)
        known = self._known_changes.get(key)
        if known is None:
            known = np.array([self.grid.change(spec, each, wanted, fused) for each in have])
            self._known_changes[key] = known
        return known

    def _own(
        self, changes: dict[Placements, Table], shared: dict[Placements, None], needs: Sequence[Placements], count: int
    ) -> Table:
        """What a reader in a state pays by itself, for each state of the value."""
        total = np.zeros(count)
        for each in needs:
            total = total + (np.where(np.isinf(changes[each]), inf, 0.0) if each in shared else changes[each])
        return total

    def _share(self, read: _Read, wanted: Placements, costs: Table) -> None:
        """A change that several readers may need is paid for once, if any of them does."""
        before: int | None = None
        phases: dict[str, None] = {}
        for reader in read.readers:
            needs = np.array([wanted in each for each in reader.wanted])
            if not needs.any():
                continue
            done = self._variable(None, [self._given(), self._given()])
            phases[reader.phase] = None
            self.graph.pair(reader.variable, done, np.where(needs[:, None] & np.array([[True, False]]), inf, 0.0))
            if before is not None:
                self.graph.pair(before, done, _ONCE)
            before = done
        assert before is not None
        paid = np.where(np.isinf(costs), 0.0, costs)
        self.graph.pair(read.variable, before, np.stack([np.zeros(len(costs)), paid], axis=1))
        if "forward" in phases and "backward" in phases:  # a copy stays from the one to the other
            nbytes = read.spec.nbytes / self.grid.parts(wanted)
            self.memory.pair(read.variable, before, np.stack([np.zeros(len(costs)), nbytes * (paid > 0)], axis=1))

    # Memory

    def _work_in_small_parts(self, kept: dict[tuple[int, int | None], None]) -> None:
        """What ops work on besides values that are kept."""
        tables: dict[int, Table] = {}
        known: dict[Any, Table] = {}
        for number, (node, described) in self._described.items():
            states = self.states[number]
            counts = tuple(self._at[value] not in kept for value in described.inputs)
            key = (id(states), described.call.inputs, described.call.outputs, counts, is_free(node))
            if key not in known:
                nbytes = [self.grid.bytes_of(node, described.call, state, counts) for state in states]
                known[key] = np.array(nbytes)
            tables[number] = known[key]
        needed = max((table.min() for table in tables.values()), default=0.0)
        for number, table in tables.items():
            self.memory.unary[number] = self.memory.unary[number] + np.maximum(table - needed, 0.0)

    def _stays(self, number: int, item: int, nbytes: int) -> None:
        """So many bytes of a result of a variable stay; a rank has its part of them."""
        parts = np.array([float(self.grid.parts(state.outputs[item])) for state in self.states[number]])
        self.memory.unary[number] = self.memory.unary[number] + nbytes / parts


_ONCE = np.array([[0.0, 0.0], [inf, 0.0]])
"""A change that has been made for one reader is there for the next."""


def _spec(node: fx.Node) -> TensorSpec:
    spec = info(node).spec
    assert isinstance(spec, TensorSpec), node
    return spec
