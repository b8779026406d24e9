"""Divide a graph among the ranks of one group of mesh axes.

One walk over the nodes in their order. For each, the strategy that sends the fewest bytes, given the layouts that
its inputs exist in by then, is chosen and written into a new graph, with redistributions in front of it. Partial sums
stay partial as long as the ops that follow are linear. What nothing decides (a parameter without a mark) takes
the layout that its first user asks for.

Nothing here depends on the number of ranks but the sizes of parts, nor on a rank at all.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.dependence import is_view, written_nodes
from commfuse_fx.ir.functions import axis_index
from commfuse_fx.ir.meta import NodeInfo, Spec, TensorSpec, dtype_name, info, set_info, tensor_spec
from commfuse_fx.ir.placement import (
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    local_shape,
)
from commfuse_fx.ir.program import LAYOUT, Program, Redistribution, Source
from commfuse_fx.ir.redistribution import exchange_parts, gather_parts, own_part, sum_and_divide, sum_partial
from commfuse_fx.sharding.axis import PROPAGATED, Axis
from commfuse_fx.sharding.call import AllReduce, Number, OpCall, Rank, Ref, Result, Step, Strategy
from commfuse_fx.sharding.layout_op import is_mark
from commfuse_fx.sharding.localize import LocalSpecs
from commfuse_fx.sharding.rules.common import on_first
from commfuse_fx.sharding.rules.registry import find_rule, strategies_of
from commfuse_fx.sharding.values import FREE, Cost, Value, can_exchange

log = logging.getLogger("commfuse_fx")
aten = torch.ops.aten

DIVIDED_WEIGHT = 1 << 20
"""Moving a parameter that is divided counts this often: activations travel, not weights."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_CASTS = (aten._to_copy.default, aten.clone.default)


@dataclass(frozen=True)
class _Described:
    """A call as rules see it, on tensors that are whole on this axis. inputs: its tensors, in order; numbers: nodes
    that compute other arguments."""

    call: OpCall
    inputs: list[fx.Node]
    numbers: list[fx.Node]


class Division:
    """Divides `program` in place over one axis. `specs` is shared by the divisions of one compile."""

    def __init__(self, program: Program, axis: Axis, specs: LocalSpecs) -> None:
        self.program = program
        self.axis = axis
        self.specs = specs
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Value] = {}
        self.copies: dict[fx.Node, fx.Node] = {}  # of inputs: old node -> new node
        self.warned: dict[tuple[Any, str], None] = {}
        self._index: fx.Node | None = None

    def run(self) -> None:
        inputs = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        for node in inputs:
            self.copies[node] = self._copy(node, {})
        for node in inputs:
            self.values[node] = self._input(node)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = Value(info(node).spec, {R: self._copy(node, {})})
            elif node.op == "call_function":
                self._call(node)
        self._finish()

    # Inputs

    def _input(self, node: fx.Node) -> Value:
        source = self.program.sources[node]
        made = self.copies[node]
        spec = info(node).spec
        if source.kind == "parameter":
            return self._parameter(node, made, source)
        placement = self.axis.inputs.get(source.name, R) if source.kind == "input" else R
        if isinstance(placement, Shard) and self.axis.local_inputs:
            self._localize(made, placement)
        elif isinstance(placement, Shard):
            made = self._own_part(made, placement, f"slice/{source.name}", info(node))
        return Value(spec, {placement: made})

    def _parameter(self, node: fx.Node, made: fx.Node, source: Source) -> Value:
        pin = self.axis.parameters.get(source.name)
        spec = info(node).spec
        if pin is None and self.axis.is_data:
            return Value(spec, {R: made})
        if pin is None:
            return Value(spec, pending=node)
        value = Value(spec)
        self._settle(value, node, pin.placement)
        return value

    def _settle(self, value: Value, node: fx.Node, placement: Placement) -> None:
        """Decide how a parameter lies on the ranks."""
        made = self.copies[node]
        value.pending = None
        name = self.program.sources[node].name
        if isinstance(placement, Shard):
            if self.axis.local_parameters:
                self._localize(made, placement)
                param = self.program.params[name]
                layout = (*param.layout, (self.axis.group, placement))
                whole = param.whole or param.spec
                local = param.spec.with_shape(local_shape(param.spec.shape, placement, self.axis.ways))
                self.program.params[name] = replace(param, spec=local, whole=whole, layout=layout, movable=True)
            else:
                with self.graph.inserting_after(self._position()):
                    made = self._own_part(made, placement, f"{name}/part", info(node))
        value.versions = {placement: made}
        value.weight = DIVIDED_WEIGHT if isinstance(placement, Shard) else 1
        pin = self.axis.parameters.get(name)
        why = pin.where if pin is not None else PROPAGATED
        if isinstance(placement, Shard) or why != PROPAGATED:
            self.program.note(LAYOUT, name, f"{placement} on {self.axis.group}: {why}")

    def _localize(self, node: fx.Node, placement: Placement) -> None:
        spec = tensor_spec(node)
        info(node).spec = spec.with_shape(local_shape(spec.shape, placement, self.axis.ways))
        _varies(node, self.axis.group)

    def _last_input(self) -> fx.Node:
        return next(reversed(self.copies.values()))

    # Calls

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(info(node.args[0]).spec, tuple):  # type: ignore[arg-type]
            self._item(node)
        elif written_nodes(node):
            self._write(node)
        elif is_mark(node):
            self._mark(node)
        elif node.target is aten.ones_like.default and tensor_spec(node).numel == 1:
            self._start_of_backward(node)
        elif self._can_wait(node):
            self.values[node] = Value(info(node).spec, pending=node)
        else:
            self._compute(node)

    def _item(self, node: fx.Node) -> None:
        """One result of an op with several; all of them were made when the op was."""
        parent: Any = node.args[0]
        value = self.values[parent]
        ((placements, made),) = value.versions.items()
        number: int = node.args[1]  # type: ignore[assignment]
        placement = placements[number] if isinstance(placements, tuple) else R
        if isinstance(made, tuple):
            new = made[number]
        else:
            new = self._emit(operator.getitem, (made, number), {}, node)
            if placement != R:
                _varies(new, self.axis.group)
        self.values[node] = Value(info(node).spec, {placement: new})

    def _write(self, node: fx.Node) -> None:
        """An update of a buffer: whole on every rank."""
        args = fx.node.map_arg(node.args, lambda arg: self._get(arg, R, node))
        kwargs = fx.node.map_arg(dict(node.kwargs), lambda arg: self._get(arg, R, node))
        self.values[node] = Value(info(node).spec, {R: self._emit(node.target, args, kwargs, node)})

    def _mark(self, node: fx.Node) -> None:
        """A layout that the user asks for. What it says nothing about stays as it is."""
        given: fx.Node = node.args[0]  # type: ignore[assignment]
        value = self.values[given]
        pin = self.axis.activations.get(info(node).name)
        if pin is not None:
            placement = pin.placement
        else:
            placement = R if value.pending is not None else next(iter(value.versions))
        new = self._emit(node.target, (self._get(given, placement, node), *node.args[1:]), {}, node)
        if placement != R:
            _varies(new, self.axis.group)
        self.values[node] = Value(value.whole, {placement: new}, weight=value.weight)

    def _start_of_backward(self, node: fx.Node) -> None:
        """The gradient of the loss: a one, which need not wait until the loss has been summed."""
        spec = tensor_spec(node)
        kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
        self.values[node] = Value(spec, {R: self._emit(aten.full.default, (list(spec.shape), 1.0), kwargs, node)})

    def _can_wait(self, node: fx.Node) -> bool:
        """A view or a cast of a parameter whose layout nobody has asked for yet."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or not (is_view(node) or node.target in _CASTS):
            return False
        return isinstance(info(node).spec, TensorSpec) and self.values[inputs[0]].pending is not None

    def _compute(self, node: fx.Node) -> None:
        described = self._describe(node)
        values = [self.values[value] for value in described.inputs]
        if all(value.is_whole for value in values):
            strategy = strategies_of(described.call)[0]
        else:
            strategy = self._choose(node, described.call, described.inputs, values)
        self._apply(node, described, strategy)

    def _describe(self, node: fx.Node) -> _Described:
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
        blocks = {1: None, **{n: None for value in inputs for n in self._blocks_in(self.values[value])}}
        call = OpCall(node.target, args, kwargs, tuple(specs), outputs, self.axis.ways, tuple(sorted(blocks)))
        return _Described(call, inputs, numbers)

    def _blocks_in(self, value: Value) -> list[int]:
        """Numbers of blocks in which the value is, or could be, divided."""
        if value.pending is None or value.pending.op == "placeholder":
            return [placement.blocks for placement in value.versions if isinstance(placement, Shard)]
        return self._blocks_in(self.values[value.pending.all_input_nodes[0]])

    def _choose(self, node: fx.Node, call: OpCall, inputs: Sequence[fx.Node], values: Sequence[Value]) -> Strategy:
        strategies = strategies_of(call)
        forward = info(node).phase == "forward"
        best: tuple[Any, Strategy] | None = None
        for number, strategy in enumerate(strategies):
            sent, cut = strategy.comm, 0
            for given, value, placement in zip(inputs, values, strategy.inputs, strict=True):
                cost = self._cost(value, placement)
                if cost is None or (placement == P and P in value.versions and len(given.users) > 1):
                    break  # what several ops need is summed once, before them
                sent += cost[0]
                cut += cost[1]
            else:
                # Somebody will have to sum it. In the backward that is so anyway, where gradients are reduced.
                # What is a partial sum already is owed as it is; one that is made for this op relieves nobody.
                owed = [R if P not in value.versions else p for value, p in zip(values, strategy.inputs, strict=True)]
                debt = _debt(call.outputs, strategy.outputs) - _debt(call.inputs, owed)
                rank = (sent + debt if forward else sent, cut, sent, debt, number)
                if best is None or rank < best[0]:
                    best = rank, strategy
        assert best is not None, "every op can work on whole tensors"
        if best[1] is strategies[0] and find_rule(node.target) is None:
            self._warn(node, call)
        return best[1]

    def _warn(self, node: fx.Node, call: OpCall) -> None:
        details = info(node)
        key = (node.target, details.module)
        if key in self.warned:
            return
        self.warned[key] = None
        text = (
            f"{node.target} has no sharding rule: its inputs are gathered over {self.axis.group}, and every rank "
            "computes the whole (cf.register_rule adds one)"
        )
        where = f"{details.module or 'the step'}{f' at {details.source}' if details.source else ''}"
        self.program.note("replicated", where, text)
        log.warning("%s: %s", where, text)

    def _cost(self, value: Value, wanted: Placement) -> Cost | None:
        if value.pending is None:
            found = value.nearest(wanted, self.axis.ways)
            return None if found is None else found[0]
        option = self._option(value, wanted)
        return None if option is None else option[0]

    def _option(self, value: Value, wanted: Placement) -> tuple[Cost, Strategy | None] | None:
        """How a value that is not decided yet can be had as `wanted`, and what that costs."""
        node = value.pending
        assert node is not None
        if node.op == "placeholder":
            possible = not isinstance(wanted, Partial) and value.transition(R, wanted, self.axis.ways) is not None
            return (FREE, None) if possible else None
        described = self._describe(node)
        best: tuple[Cost, Strategy | None] | None = None
        for strategy in strategies_of(described.call):
            if strategy.outputs == (wanted,):
                cost = self._cost(self.values[described.inputs[0]], strategy.inputs[0])
                if cost is not None and (best is None or cost < best[0]):
                    best = cost, strategy
        return best

    # Writing the new graph

    def _get(self, node: fx.Node, wanted: Placement, consumer: fx.Node, serves: tuple[str, ...] = ()) -> fx.Node:
        """The new node that holds this value in a layout; made if it is not there yet."""
        value = self.values[node]
        if value.pending is not None:
            if wanted in value.versions:
                return value.versions[wanted]
            option = self._option(value, wanted)
            if option is None:
                self._decide(value, R)
            elif option[1] is None:
                self._settle(value, value.pending, wanted)
            else:
                pending, value.pending = value.pending, None
                self._apply(pending, self._describe(pending), option[1])
                value.versions = self.values[pending].versions
                value.weight = self.values[pending].weight
                self.values[pending] = value
        if wanted in value.versions:
            return value.versions[wanted]
        found = value.nearest(wanted, self.axis.ways)
        assert found is not None, f"{info(node).name} cannot become {wanted}"
        return self._redistribute(value, node, found[1], wanted, consumer, serves)

    def _decide(self, value: Value, placement: Placement) -> None:
        node = value.pending
        assert node is not None
        if node.op == "placeholder":
            self._settle(value, node, placement)
            return
        given = node.all_input_nodes[0]
        if self.values[given].pending is not None:
            self._decide(self.values[given], placement)
        value.pending = None
        self._compute(node)
        value.versions = self.values[node].versions
        self.values[node] = value

    def _redistribute(
        self,
        value: Value,
        node: fx.Node,
        have: Placement,
        wanted: Placement,
        consumer: fx.Node,
        serves: tuple[str, ...],
    ) -> fx.Node:
        source = value.versions[have]
        ways, group = self.axis.ways, self.axis.group
        name = info(node).name
        phase = info(source if consumer.op == "output" else consumer).phase
        like = replace(info(source), phase="backward" if serves else phase, collective=None, origin="")
        if isinstance(wanted, Shard) and isinstance(have, Replicate):
            return value.add(wanted, self._own_part(source, wanted, f"{name}/part", like))
        if isinstance(wanted, Partial):
            made = self._make(on_first, (source, self._position()), {}, like, f"{name}/on_first")
            _varies(made, group)
            return made  # for this consumer alone: others go on with the whole value
        low = serves and tensor_spec(source).dtype in _LOW_PRECISION and self.program.config.gradient_fp32_sync
        original = tensor_spec(source).dtype
        if low and isinstance(have, Partial):
            source = self._make(aten._to_copy.default, (source,), {"dtype": torch.float32}, like, f"{name}/f32")
        if isinstance(have, Partial) and isinstance(wanted, Shard):
            made = self._make(sum_and_divide, (source, group, ways, wanted.dim, wanted.blocks), {}, like, f"{name}/sum")
        elif isinstance(have, Partial):
            made = self._make(sum_partial, (source, group, "sum"), {}, like, f"{name}/sum")
        else:
            assert isinstance(have, Shard)
            if isinstance(wanted, Shard) and can_exchange(have, wanted):
                args = (source, group, ways, have.dim, wanted.dim)
                made = self._make(exchange_parts, args, {}, like, f"{name}/exchange")
            else:
                args = (source, group, ways, have.dim, have.blocks)
                made = self._make(gather_parts, args, {}, like, f"{name}/gather")
                if isinstance(wanted, Shard):
                    _agrees(made, group)
                    value.add(R, made)
                    self._record(made, value, have, R, consumer, serves)
                    return value.add(wanted, self._own_part(made, wanted, f"{name}/part", like))
        self._record(made, value, have, wanted, consumer, serves)
        info(made).serves = serves
        if low and isinstance(have, Partial):
            made = self._make(
                aten._to_copy.default, (made,), {"dtype": original}, like, f"{name}/{dtype_name(original)}"
            )
        if wanted == R:
            _agrees(made, group)
        else:
            _varies(made, group)
        return value.add(wanted, made)

    def _record(
        self,
        made: fx.Node,
        value: Value,
        have: Placement,
        wanted: Placement,
        consumer: fx.Node,
        serves: tuple[str, ...],
    ) -> None:
        assert isinstance(value.whole, TensorSpec)
        if serves:
            cause = f"gradient of {', '.join(serves)}"
        else:
            cause = f"{info(consumer).name or 'the result'} needs {wanted}"
        details = (self.axis.group, str(have), str(wanted), value.whole.nbytes, cause)
        self.program.redistributions.append(Redistribution(info(made).name, *details))

    def _own_part(self, source: fx.Node, placement: Shard, name: str, like: NodeInfo) -> fx.Node:
        args = (source, self._position(), self.axis.ways, placement.dim, placement.blocks)
        made = self._make(own_part, args, {}, replace(like, collective=None, origin=""), name)
        if info(made).phase == "input":
            info(made).phase = "forward"
        _varies(made, self.axis.group)
        return made

    def _position(self) -> fx.Node:
        """This rank's place in the group."""
        if self._index is None:
            with self.graph.inserting_after(self._last_input()):
                made = self.graph.call_function(axis_index, (self.axis.group,))
            name = self.program.names.reserve(f"axis_index/{self.axis.group}")
            self._index = set_info(made, NodeInfo("forward", None, name=name))
        return self._index

    def _apply(self, node: fx.Node, described: _Described, strategy: Strategy) -> None:
        call, inputs, numbers = described.call, described.inputs, described.numbers
        taken = [self._get(value, placement, node) for value, placement in zip(inputs, strategy.inputs, strict=True)]
        unchanged = not strategy.steps and all(
            info(value).spec == spec for value, spec in zip(taken, call.inputs, strict=True)
        )
        steps = strategy.steps or (Step(call.target, call.args, call.kwargs),)
        made: list[fx.Node] = []

        def bind(value: Any) -> Any:
            if isinstance(value, Ref):
                return taken[value.index]
            if isinstance(value, Number):
                return self.values[numbers[value.index]].versions[R]
            if isinstance(value, Result):
                return self._result(made[value.step], value.item, node)
            if isinstance(value, Rank):
                return self._position()
            if isinstance(value, tuple):
                return [bind(item) for item in value]
            return value

        for number, step in enumerate(steps):
            if isinstance(step, AllReduce):
                args: tuple[Any, ...] = (bind(step.value), self.axis.group, step.op)
                made.append(self._part_of(node, sum_partial, args, {}, f"step.{number}"))
                continue
            args, kwargs = tuple(bind(arg) for arg in step.args), {name: bind(value) for name, value in step.kwargs}
            if number == len(steps) - 1 and not strategy.results:
                made.append(self._emit(step.target, args, kwargs, node, unchanged))
            else:
                made.append(self._part_of(node, step.target, args, kwargs, f"step.{number}"))
        for each in made:
            if any(placement != R for placement in strategy.outputs):
                _varies(each, self.axis.group)
        several = isinstance(info(node).spec, tuple)
        placements: Any = strategy.outputs if several else strategy.outputs[0]
        result: Any = made[-1]
        if strategy.results:
            items = tuple(self._result(made[each.step], each.item, node) for each in strategy.results)
            result = items if several else items[0]
        weight = self.values[inputs[0]].weight if len(inputs) == 1 and is_view(node) else 1
        self.values[node] = Value(info(node).spec, {placements: result}, weight=weight)

    def _result(self, made: fx.Node, item: int | None, node: fx.Node) -> fx.Node:
        if item is None:
            return made
        return self._part_of(node, operator.getitem, (made, item), {}, f"item.{item}")

    def _part_of(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], suffix: str
    ) -> fx.Node:
        like = replace(info(node), collective=None, origin="")
        return self._make(target, args, kwargs, like, f"{info(node).name}/{suffix}")

    def _make(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: NodeInfo, name: str
    ) -> fx.Node:
        """A node that the old graph does not have."""
        target, spec = self._spec(target, args, kwargs)
        node = self.graph.call_function(target, args, dict(kwargs))
        made = replace(like, spec=spec, name=self.program.names.reserve(name), serves=())
        return set_info(node, made)

    def _emit(
        self, target: Any, args: Any, kwargs: Mapping[str, Any], old: fx.Node, unchanged: bool = False
    ) -> fx.Node:
        """The node that stands for an old one, on this rank's parts; `unchanged`, which are as large as the whole."""
        target, spec = (target, info(old).spec) if unchanged else self._spec(target, args, kwargs)
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        return set_info(node, replace(info(old), spec=spec))

    def _spec(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Spec]:
        if target is operator.getitem:
            parent = info(args[0]).spec
            assert isinstance(parent, tuple)
            return target, parent[args[1]]
        if target is axis_index or (args and target in (operator.mul, operator.add)):
            return target, None
        return self.specs.of(target, args, kwargs)

    def _copy(self, node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> fx.Node:
        made = self.graph.node_copy(node, same.__getitem__)
        return set_info(made, replace(info(node)))

    # The end

    def _finish(self) -> None:
        program = self.program
        output = program.output
        for node in [node for node, value in self.values.items() if value.pending is not None]:
            if node.op == "placeholder":
                self._settle(self.values[node], node, R)
        served: dict[fx.Node, list[str]] = {}
        for name, grad in program.grads.items():
            served.setdefault(grad, []).append(name)
        grads: dict[str, fx.Node] = {}
        for grad, names in served.items():
            for name in names:
                grads[name] = self._get(grad, self._gradient_layout(name), output, tuple(names))
        program.loss = self._get(program.loss, R, output)
        program.grads = {name: grads[name] for name in program.grads}
        self.graph.output((program.loss, *program.grads.values()))
        self.graph.output_node().meta = output.meta.copy()
        set_info(self.graph.output_node(), replace(info(output)))
        program.replace_graph(self.graph, self.copies)

    def _gradient_layout(self, name: str) -> Placement:
        """A gradient lies as its parameter does; whole where every rank keeps the whole parameter."""
        layout = self.program.params[name].layout
        if layout and layout[-1][0] == self.axis.group:
            placement: Placement = layout[-1][1]
            return placement
        return R


def _debt(specs: Sequence[TensorSpec | None], placements: Sequence[Placement]) -> int:
    """Bytes that summing these partial sums will send."""
    return sum(2 * spec.nbytes for spec, p in zip(specs, placements, strict=True) if p == P and spec is not None)


def _varies(node: fx.Node, group: str) -> None:
    """The node's value differs between the ranks of this group."""
    details = info(node)
    groups = [each for each in (details.varies or "").split(",") if each]
    if group not in groups:
        details.varies = ",".join([*groups, *group.split(",")])


def _agrees(node: fx.Node, group: str) -> None:
    details = info(node)
    leaving = group.split(",")
    details.varies = ",".join(axis for axis in (details.varies or "").split(",") if axis and axis not in leaving)
