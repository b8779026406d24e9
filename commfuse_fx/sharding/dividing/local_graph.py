"""The local graph that one rank runs, while a division writes it: nodes with local specs, and redistributions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.functions import axis_index
from commfuse_fx.ir.core.meta import NodeInfo, Spec, TensorSpec, info, set_info, tensor_spec
from commfuse_fx.ir.core.placement import Partial, Placement, R, Replicate, Shard, local_shape
from commfuse_fx.ir.core.program import Program, Redistribution
from commfuse_fx.ir.ops.redistribution import exchange_parts, gather_parts, own_part, sum_and_divide, sum_partial
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.dividing.divided_value import Value, can_exchange
from commfuse_fx.sharding.dividing.gradient_precision import summed_in_float32
from commfuse_fx.sharding.dividing.localize import LocalSpecs
from commfuse_fx.sharding.dividing.variation import agrees, varies
from commfuse_fx.sharding.rules.writing.common import on_first

aten = torch.ops.aten


class LocalGraph:
    """The graph that a division writes. New nodes go to the end, and parts of inputs right behind the inputs.

    specs: finds local specs. All divisions of one compile share it.
    """

    def __init__(self, program: Program, axis: Axis, specs: LocalSpecs) -> None:
        self.program = program
        self.axis = axis
        self.specs = specs
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}  # old -> new
        self._index: fx.Node | None = None

    def add_inputs(self) -> list[fx.Node]:
        """Copy all inputs of the old graph; returns the old ones."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.inputs[node] = self.copy(node)
        return list(self.inputs)

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node that has no inputs."""
        return set_info(self.graph.node_copy(node), replace(info(node)))

    def localize(self, node: fx.Node, placement: Placement) -> None:
        """Give this input the spec of a rank's part."""
        spec = tensor_spec(node)
        info(node).spec = spec.with_shape(local_shape(spec.shape, placement, self.axis.ways))
        varies(node, self.axis.group)

    def make(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: NodeInfo, name: str) -> fx.Node:
        """A node that the old graph does not have."""
        target, spec = self._spec(target, args, kwargs)
        node = self.graph.call_function(target, args, dict(kwargs))
        made = replace(like, spec=spec, name=self.program.names.reserve(name), serves=())
        return set_info(node, made)

    def emit(self, target: Any, args: Any, kwargs: Mapping[str, Any], old: fx.Node, unchanged: bool = False) -> fx.Node:
        """Add the node that replaces an old one on this rank's parts.

        unchanged: whether the parts are as large as the whole tensors, so that the old spec holds.
        """
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

    def redistribute(
        self,
        value: Value,
        node: fx.Node,
        have: Placement,
        wanted: Placement,
        consumer: fx.Node,
        serves: tuple[str, ...],
    ) -> fx.Node:
        """Redistribute the value of an old node from the placement `have` to `wanted`; returns the new node.

        value: the versions of the value. consumer: the old node that needs it.
        serves: the parameters whose gradient the value is. Low-precision gradients are summed in float32 if
            gradient_fp32_sync says so, and stay so until `in_own_precision` casts them back.
        """
        source = value.versions[have]
        ways, group = self.axis.ways, self.axis.group
        name = info(node).name
        # Values that the step returns or writes at its end are computed before the update begins.
        at_the_end = consumer.op == "output" or info(consumer).phase == "update"
        phase = "backward" if serves else info(source if at_the_end else consumer).phase
        like = replace(info(source), phase="forward" if phase == "input" else phase, collective=None, origin="")
        if isinstance(wanted, Shard) and isinstance(have, Replicate):
            return value.add(wanted, self.own_part(source, wanted, f"{name}/part", like))
        if isinstance(wanted, Partial):
            made = self.make(on_first, (source, self.position()), {}, like, f"{name}/on_first")
            varies(made, group)
            return made  # only for this consumer: the whole value stays the version for others
        if serves and isinstance(have, Partial) and summed_in_float32(tensor_spec(source), self.program):
            source = self.make(aten._to_copy.default, (source,), {"dtype": torch.float32}, like, f"{name}/f32")
            info(source).serves = serves
        if isinstance(have, Partial) and isinstance(wanted, Shard):
            made = self.make(sum_and_divide, (source, group, ways, wanted.dim, wanted.blocks), {}, like, f"{name}/sum")
        elif isinstance(have, Partial):
            made = self.make(sum_partial, (source, group, "sum"), {}, like, f"{name}/sum")
        else:
            assert isinstance(have, Shard)
            if isinstance(wanted, Shard) and can_exchange(have, wanted):
                args = (source, group, ways, have.dim, wanted.dim)
                made = self.make(exchange_parts, args, {}, like, f"{name}/exchange")
            else:
                args = (source, group, ways, have.dim, have.blocks)
                made = self.make(gather_parts, args, {}, like, f"{name}/gather")
                if isinstance(wanted, Shard):
                    agrees(made, group)
                    value.add(R, made)
                    self._record(made, value, have, R, consumer, serves)
                    return value.add(wanted, self.own_part(made, wanted, f"{name}/part", like))
        self._record(made, value, have, wanted, consumer, serves)
        info(made).serves = serves
        return value.add(wanted, self._known(made, wanted))

    def _known(self, made: fx.Node, placement: Placement) -> fx.Node:
        """Note whether the node varies between the ranks of the group; returns the node."""
        if placement == R:
            agrees(made, self.axis.group)
        else:
            varies(made, self.axis.group)
        return made

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

    def own_part(self, source: fx.Node, placement: Shard, name: str, like: NodeInfo) -> fx.Node:
        args = (source, self.position(), self.axis.ways, placement.dim, placement.blocks)
        made = self.make(own_part, args, {}, replace(like, collective=None, origin=""), name)
        if info(made).phase == "input":
            info(made).phase = "forward"
        varies(made, self.axis.group)
        return made

    def position(self) -> fx.Node:
        """This rank's place in the group."""
        if self._index is None:
            with self.graph.inserting_after(next(reversed(self.inputs.values()))):
                made = self.graph.call_function(axis_index, (self.axis.group,))
            name = self.program.names.reserve(f"axis_index/{self.axis.group}")
            self._index = set_info(made, NodeInfo("forward", None, name=name, varies=self.axis.group))
        return self._index


def part_over_other_axes(node: fx.Node) -> fx.Node | None:
    """The part of an input that is all that is used of it."""
    users = [*node.users]
    return users[0] if len(users) == 1 and users[0].target is own_part else None
