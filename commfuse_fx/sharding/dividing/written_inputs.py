"""Divide the writes of a step to its inputs: parameters, buffers and tensors of the batch that the model changes.

After capture these writes are `copy_` nodes at the end of the graph. If a rank holds only its part of an input, it
writes only that part.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.core.placement import Placement, R, Shard
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.dividing.local_graph import LocalGraph
from commfuse_fx.sharding.dividing.variation import agrees, varies

_COPY = torch.ops.aten.copy_.default


def writes_input(node: fx.Node) -> bool:
    """Whether the node writes a whole input of the step."""
    return node.target is _COPY and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


@dataclass
class _Write:
    node: fx.Node
    target: fx.Node  # in the new graph, as are the arguments
    rest: tuple[fx.node.Argument, ...]
    placement: Placement


class WrittenInputs:
    """The writes of one division. All values are computed before the first write, which may change their inputs.

    own: the old nodes of which each rank has a value of its own part of the batch.
    get: called as get(node, placement, consumer); gives the new node of an old node's value.
    settle: called as settle(value, node, placement); decides the placement of a parameter.
    """

    def __init__(
        self,
        program: Program,
        axis: Axis,
        local: LocalGraph,
        values: Mapping[fx.Node, Value],
        own: Container[fx.Node],
        get: Callable[[fx.Node, Placement, fx.Node], fx.Node],
        settle: Callable[[Value, fx.Node, Placement], None],
    ) -> None:
        self.program = program
        self.axis = axis
        self.local = local
        self.values = values
        self.own = own
        self._get = get
        self._settle = settle
        self._writes: list[_Write] = []

    def prepare(self, node: fx.Node) -> None:
        """Redistribute the value that an old node writes to the placement of the input."""
        target, given = node.args[:2]
        assert isinstance(target, fx.Node) and isinstance(given, fx.Node)
        placement = self._held(target, given)
        value = self._get(given, placement, node)
        self._writes.append(_Write(node, self.local.inputs[target], (value, *node.args[2:]), placement))

    def emit(self) -> None:
        """Add all prepared writes to the new graph."""
        for write in self._writes:
            made = self.local.emit(_COPY, (write.target, *write.rest), write.node.kwargs, write.node)
            if write.placement == R and write.node.args[0] not in self.own:
                agrees(made, self.axis.group)
            else:
                varies(made, self.axis.group)

    def _held(self, target: fx.Node, given: fx.Node) -> Placement:
        """The placement of an input in a rank's memory."""
        source = self.program.sources[target]
        if source.kind == "input":
            return self.axis.inputs.get(source.name, R) if self.axis.local_inputs else R
        if source.kind != "parameter":
            return R
        value = self.values[target]
        if value.pending is not None:  # the step writes it without reading it
            self._settle(value, value.pending, self._like(value, given))
        return self.program.params[source.name].placement_on(self.axis.group)

    def _like(self, value: Value, given: fx.Node) -> Placement:
        """A placement for an undecided parameter, for which the written value need not be moved."""
        found = [placement for placement in self.values[given].versions if isinstance(placement, Shard)]
        if found and self.axis.local_parameters and value.transition(R, found[0], self.axis.ways) is not None:
            return found[0]
        return R
