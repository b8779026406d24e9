"""Divide a graph among the ranks of one group of mesh axes.

The division walks over the nodes in their order. For each node it chooses the strategy that sends the fewest bytes,
given the placements in which its inputs exist by then. It writes the node into a new graph, with redistributions in
front of it. Partial sums stay partial as long as the ops that follow are linear. A parameter without a mark gets the
placement that its first user asks for.

The result does not depend on the rank. Only the sizes of parts depend on the number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import CommFuseError, ConfigValueError
from commfuse_fx.ir.core.dependence import is_view, written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, info, set_info, tensor_spec
from commfuse_fx.ir.core.placement import Placement, R, Shard, local_shape
from commfuse_fx.ir.core.program import LAYOUT, Program, Source
from commfuse_fx.ir.ops.redistribution import sum_partial
from commfuse_fx.sharding.dividing.axis import PROPAGATED, Axis, mark_has_room, parameter_has_room
from commfuse_fx.sharding.dividing.choose_strategy import Chooser, Described
from commfuse_fx.sharding.dividing.decisions import State
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.dividing.gradient_precision import is_widened
from commfuse_fx.sharding.dividing.local_graph import LocalGraph, part_over_other_axes
from commfuse_fx.sharding.dividing.localize import LocalSpecs
from commfuse_fx.sharding.dividing.made_of_constants import MadeOfConstants
from commfuse_fx.sharding.dividing.own_parts import OwnParts
from commfuse_fx.sharding.dividing.undivided import OpsWithoutRule, cannot_divide
from commfuse_fx.sharding.dividing.variation import agrees, varies, varies_as_inputs
from commfuse_fx.sharding.dividing.written_inputs import WrittenInputs, writes_input
from commfuse_fx.sharding.marking.layout_op import is_mark
from commfuse_fx.sharding.rules.writing.call import AllReduce, Number, Rank, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import find_rule

aten = torch.ops.aten

DIVIDED_WEIGHT = 1 << 20
"""The weight of a divided parameter's bytes: so large that always activations are moved instead of parameters."""

_CASTS = (aten._to_copy.default, aten.clone.default)


class Division:
    """Divides `program` in place over one axis. `specs` is shared by the divisions of one compile. `later`: axes
    that divide the result further."""

    def __init__(self, program: Program, axis: Axis, specs: LocalSpecs, later: Sequence[Axis] = ()) -> None:
        self.program = program
        self.axis = axis
        self.later = later
        self.local = LocalGraph(program, axis, specs)
        self.values: dict[fx.Node, Value] = {}
        self._cut_again: dict[fx.Node, Shard] = {}  # parts of inputs over other axes
        self._wholes: dict[fx.Node, fx.Node] = {}  # of inputs that are cut, as ranks are handed them
        self.chooser = Chooser(self.values, axis.ways)
        self.constants = MadeOfConstants(program)
        self.own = OwnParts(program, axis.group, axis.ways)
        self.written = WrittenInputs(program, axis, self.local, self.values, self.own, self._get, self._settle)
        self.not_taken: dict[fx.Node, State] = {}
        """Nodes whose fixed strategy their op or their inputs cannot have, with what they take instead."""
        self._without_rule = OpsWithoutRule(program, axis.group)

    def run(self) -> None:
        for node in self.local.add_inputs():
            self.values[node] = self._input(node)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = Value(info(node).spec, {R: self.local.copy(node)})
            elif node.op == "call_function":
                try:
                    self._call(node)
                    self._cut(node)
                except CommFuseError:
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    raise cannot_divide(node, self.axis.group, error) from error
        self._finish()

    # Inputs

    def _input(self, node: fx.Node) -> Value:
        source = self.program.sources[node]
        made = self.local.inputs[node]
        spec = info(node).spec
        if source.kind == "parameter":
            return self._parameter(node, made, source)
        placement = self.axis.inputs.get(source.name, R) if source.kind == "input" else R
        if isinstance(placement, Shard) and self.axis.local_inputs:
            self.local.localize(made, placement)
        elif isinstance(placement, Shard) and (part := part_over_other_axes(node)) is not None:
            self._cut_again[part] = placement
            placement = R
        elif isinstance(placement, Shard):
            self._wholes[node] = made
            made = self.local.own_part(made, placement, f"slice/{source.name}", info(node))
        elif node in self.own:
            varies(made, self.axis.group)
        return Value(spec, {placement: made})

    def _cut(self, node: fx.Node) -> None:
        """A part of an input over other axes is cut further over this one."""
        placement = self._cut_again.get(node)
        if placement is not None:
            self._wholes[node] = self.values[node].versions[R]
            part = self.local.own_part(self._wholes[node], placement, info(node).name, info(node))
            self.values[node] = Value(info(node).spec, {placement: part})

    def _parameter(self, node: fx.Node, made: fx.Node, source: Source) -> Value:
        pin = self.axis.parameters.get(source.name)
        spec = info(node).spec
        if pin is None:
            has_room = parameter_has_room(source.name, tensor_spec(node).shape, self.axis, self.later)
            return Value(spec, pending=node) if has_room and not self.axis.is_data else Value(spec, {R: made})
        value = Value(spec)
        self._settle(value, node, pin.placement)
        return value

    def _settle(self, value: Value, node: fx.Node, placement: Placement) -> None:
        """Decide the placement of a parameter. Raises ConfigValueError if it shares memory and would be divided."""
        made = self.local.inputs[node]
        value.pending = None
        name = self.program.sources[node].name
        if isinstance(placement, Shard):
            if self.axis.local_parameters:
                self.local.localize(made, placement)
                param = self.program.params[name]
                if param.shares:
                    raise ConfigValueError(
                        f"parameter {name} is divided among ranks, but shares memory with {', '.join(param.shares)}, "
                        "which would not see what a rank writes to its part: give the parameter memory of its own "
                        "(clone it), or leave it whole"
                    )
                layout = (*param.layout, (self.axis.group, placement))
                whole = param.whole or param.spec
                local = param.spec.with_shape(local_shape(param.spec.shape, placement, self.axis.ways))
                self.program.params[name] = replace(
                    param, spec=local, whole=whole, layout=layout, movable=True, is_block=True
                )
            else:
                with self.local.graph.inserting_after(self.local.position()):
                    made = self.local.own_part(made, placement, f"{name}/part", info(node))
        value.versions = {placement: made}
        value.weight = DIVIDED_WEIGHT if isinstance(placement, Shard) else 1
        pin = self.axis.parameters.get(name)
        why = pin.where if pin is not None else PROPAGATED
        if isinstance(placement, Shard) or why != PROPAGATED:
            self.program.note(LAYOUT, name, f"{placement} on {self.axis.group}: {why}")

    # Calls

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(info(node.args[0]).spec, tuple):  # type: ignore[arg-type]
            self._item(node)
        elif writes_input(node):
            pass  # `_finish` writes it at the end
        elif written_nodes(node):
            self._write(node)
        elif is_mark(node) or is_widened(node):
            self._pass_on(node)
        elif node.target is aten.ones_like.default and tensor_spec(node).numel == 1:
            self._start_of_backward(node)
        elif self._can_wait(node):
            self.values[node] = Value(info(node).spec, pending=node)
        elif node not in self.own and info(node).name not in self.axis.states and self.constants.has(node):
            self.values[node] = Value(info(node).spec, made_by=node)
        else:
            self._compute(node)

    def _item(self, node: fx.Node) -> None:
        """One result of an op with several results. All of them were placed together with the op."""
        parent: Any = node.args[0]
        value = self.values[parent]
        ((placements, made),) = value.versions.items()
        number: int = node.args[1]  # type: ignore[assignment]
        placement = placements[number] if isinstance(placements, tuple) else R
        if isinstance(made, tuple):
            new = made[number]
        else:
            new = self.local.emit(operator.getitem, (made, number), {}, node)
            self._lies(node, new, placement)
        self.values[node] = Value(info(node).spec, {placement: new})

    def _write(self, node: fx.Node) -> None:
        """An op that writes to memory of the graph itself runs on whole tensors on every rank."""
        args = fx.node.map_arg(node.args, lambda arg: self._get(arg, R, node))
        kwargs = fx.node.map_arg(dict(node.kwargs), lambda arg: self._get(arg, R, node))
        made = self.local.emit(node.target, args, kwargs, node)
        if node in self.own:
            varies(made, self.axis.group)
        self.values[node] = Value(info(node).spec, {R: made})

    def _pass_on(self, node: fx.Node) -> None:
        """A mark redistributes a value if it asks for a placement on this group. Else the result lies as the value."""
        given: fx.Node = node.args[0]  # type: ignore[assignment]
        value = self.values[given]
        pin = self.axis.activations.get(info(node).name)
        lies = R if value.pending is not None else next(iter(value.versions), R)
        has_room = mark_has_room(info(node).name, tensor_spec(node).shape, lies, self.axis, self.later)
        placement = pin.placement if pin is not None and node not in self.own else lies if has_room else R
        taken = self._get(given, placement, node)
        new = self.local.emit(node.target, (taken, *node.args[1:]), node.kwargs, node)
        self._lies(node, new, placement)
        self.values[node] = Value(info(node).spec, {placement: new}, weight=value.weight)

    def _start_of_backward(self, node: fx.Node) -> None:
        """The gradient of the loss is a constant 1, so that the backward need not wait for the summed loss."""
        spec = tensor_spec(node)
        kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
        self.values[node] = Value(spec, {R: self.local.emit(aten.full.default, (list(spec.shape), 1.0), kwargs, node)})
        self.constants.add(node)

    def _can_wait(self, node: fx.Node) -> bool:
        """Whether the node is a view or a cast of a parameter whose placement is still undecided."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or not (is_view(node) or node.target in _CASTS):
            return False
        return isinstance(info(node).spec, TensorSpec) and self.values[inputs[0]].pending is not None

    def _compute(self, node: fx.Node) -> None:
        described = self.chooser.describe(node, self.axis.blocks)
        state = self.axis.states.get(info(node).name)
        strategy = self.own.strategy(node, described.call)
        if strategy is None and state is not None:
            strategy = self.chooser.fixed(described, state)
        if strategy is None:
            strategy = self.chooser.choose(node, described)
            if state is not None:
                self.not_taken[node] = State(strategy.outputs, strategy.inputs)
        if (
            node not in self.own
            and find_rule(node.target) is None
            and not all(self.values[value].is_whole for value in described.inputs)
        ):
            self._without_rule.warn(node)
        self._apply(node, described, strategy)

    # Writing the new graph

    def _get(self, node: fx.Node, wanted: Placement, consumer: fx.Node, serves: tuple[str, ...] = ()) -> fx.Node:
        """The new node that holds this value with the placement `wanted`. It is made if it does not exist yet.

        consumer: the old node that needs it. serves: the parameters whose gradient the value is.
        """
        value = self.values[node]
        if value.made_by is not None and wanted not in value.versions:
            self._make(value, wanted)
        if value.pending is not None:
            if wanted in value.versions:
                return value.versions[wanted]
            option = self.chooser.option(value, wanted)
            if option is None:
                self._decide(value, R)
            elif option[1] is None:
                self._settle(value, value.pending, wanted)
            else:
                pending, value.pending = value.pending, None
                self._apply(pending, self.chooser.describe(pending), option[1])
                value.versions = self.values[pending].versions
                value.weight = self.values[pending].weight
                self.values[pending] = value
        if wanted not in value.versions and node in self._wholes:
            value.versions[R] = self._wholes[node]
        if wanted in value.versions:
            return value.versions[wanted]
        found = value.nearest(wanted, self.axis.ways)
        assert found is not None, f"{info(node).name} cannot become {wanted}"
        return self.local.redistribute(value, node, found[1], wanted, consumer, serves)

    def _make(self, value: Value, wanted: Placement) -> None:
        """Compute a value that is made of constants: as it is wanted, or the whole, of which a part is cut then."""
        node = value.made_by
        assert node is not None
        placement = wanted if self.chooser.making(value, wanted) else R
        making = self.chooser.making(value, placement)
        assert making is not None, "every op can work on whole tensors"
        if placement in value.versions:
            return
        self._apply(node, *making)
        made = self.values[node].versions[placement]
        if value.versions:
            info(made).name = self.program.names.reserve(f"{info(node).name}/again")
        value.versions[placement] = made
        self.values[node] = value

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

    def _apply(self, node: fx.Node, described: Described, strategy: Strategy) -> None:
        call, inputs, numbers = described.call, described.inputs, described.numbers
        given = zip(inputs, strategy.inputs, strict=True)
        taken = [self._get(value, placement, node, info(node).serves) for value, placement in given]
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
                return self.local.position()
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
                made.append(self.local.emit(step.target, args, kwargs, node, unchanged))
            else:
                made.append(self._part_of(node, step.target, args, kwargs, f"step.{number}"))
        several = isinstance(info(node).spec, tuple)
        placements: Any = strategy.outputs if several else strategy.outputs[0]
        result: Any = made[-1]
        if strategy.results:
            items = tuple(self._result(made[each.step], each.item, node) for each in strategy.results)
            for item, placement in zip(items, strategy.outputs, strict=True):
                self._lies(node, item, placement)
            result = items if several else items[0]
        else:
            self._lies(node, result, *strategy.outputs)
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
        made = self.local.make(target, args, kwargs, like, f"{info(node).name}/{suffix}")
        varies_as_inputs(made)
        return made

    def _lies(self, node: fx.Node, made: fx.Node, *placements: Placement) -> None:
        """Note whether a new node with these placements varies between the ranks of the group. node: the old one."""
        if node in self.own or any(placement != R for placement in placements):
            varies(made, self.axis.group)
        else:
            agrees(made, self.axis.group)

    # The end

    def _finish(self) -> None:
        program = self.program
        output = program.output
        for node in program.graph.nodes:
            if writes_input(node):
                self.written.prepare(node)
        for node in [node for node, value in self.values.items() if value.pending is not None]:
            if node.op == "placeholder":
                self._settle(self.values[node], node, R)
        served: dict[fx.Node, list[str]] = {}
        for name, grad in program.grads.items():
            served.setdefault(grad, []).append(name)
        grads: dict[str, fx.Node] = {}
        for grad, names in served.items():
            for name in names:
                # A gradient lies as its parameter does; whole where every rank keeps the whole parameter.
                layout = program.params[name].placement_on(self.axis.group)
                grads[name] = self._get(grad, layout, output, tuple(names))
        program.loss = self._get(program.loss, R, output)
        program.grads = {name: grads[name] for name in program.grads}
        self.written.emit()
        program.aux = {name: self._get(node, R, output) for name, node in program.aux.items()}
        self.local.graph.output(program.returned)
        self.local.graph.output_node().meta = output.meta.copy()
        set_info(self.local.graph.output_node(), replace(info(output)))
        program.replace_graph(self.local.graph, self.local.inputs)
