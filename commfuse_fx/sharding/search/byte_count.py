"""The bytes that a rank holds, by the strategies of a step: a graph of variables with bytes in place of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from commfuse_fx.cost.memory import Memory
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.search.axis_grid import AxisGrid, LaidOut
from commfuse_fx.sharding.search.kept_bytes import copies
from commfuse_fx.sharding.search.priced_reads import LayoutRead
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph


class ByteCount:
    """Counts bytes at the moment when the step would have most of them if nothing were divided.

    They are those of parameters with their states and the gradients that are there by then, of values that live at that
    moment, and of copies of them in other layouts.

    graph: gets the bytes. states: of each of its variables.
    """

    def __init__(
        self, program: Program, grid: AxisGrid, graph: FactorGraph, states: Sequence[Sequence[LaidOut]]
    ) -> None:
        self._program, self._grid, self._graph, self._states = program, grid, graph, states

    def count(
        self,
        parameters: Mapping[str, int],
        at: Mapping[fx.Node, tuple[int, int | None]],
        reads: Mapping[tuple[int, int], LayoutRead],
    ) -> None:
        """Count all of them.

        parameters: their variables. at: of each node its variable, and which result of it.
        reads: who reads which result of a variable.
        """
        program = self._program
        roots = Roots(program.graph, program.aliases())
        moment, alive = Memory(program, roots).at_peak()
        order = {node: place for place, node in enumerate(program.graph.nodes)}
        for name, number in parameters.items():
            node, grad = program.placeholder("parameter", name), program.grads.get(name)
            assert node is not None
            count = copies(program, name, grad is not None and order[grad] <= order[moment])
            self._stays(number, 0, count * tensor_spec(node).nbytes)
        gradients = {roots[grad] for grad in program.grads.values()} - {moment}
        for root, nbytes in alive.items():
            if root in at and root not in gradients:
                number, item = at[root]
                self._stays(number, item or 0, nbytes)
        if moment in at:
            self._copies_for(at[moment][0], reads)

    def _copies_for(self, reader: int, reads: Mapping[tuple[int, int], LayoutRead]) -> None:
        """The values that a variable reads in another layout than they have."""
        for (number, item), read in reads.items():
            for wanted in (each.wanted for each in read.readers if each.variable == reader and number != reader):
                nbytes = [
                    [
                        sum(read.spec.nbytes / self._grid.parts(each) for each in needs if each != state.outputs[item])
                        for needs in wanted
                    ]
                    for state in self._states[number]
                ]
                self._graph.pair(number, reader, np.array(nbytes))

    def _stays(self, number: int, item: int, nbytes: int) -> None:
        """So many bytes of a result of a variable stay; a rank has its part of them."""
        parts = np.array([float(self._grid.parts(state.outputs[item])) for state in self._states[number]])
        self._graph.unary[number] = self._graph.unary[number] + nbytes / parts
