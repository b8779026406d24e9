"""Run one program for all ranks in one process, node by node, with no devices and no process groups.

Collectives work on the list of the ranks' tensors, with the worst timing that a real network could have. The result
of a start is poisoned (filled with NaN) until its wait. If the runtime does not copy the input at the start, the input
is read at the wait. A piece of a bucket is on the wire from the moment it is sent. Memory that no node has written yet
is poisoned, and so is memory that is kept between steps, after its last use in a step. So a graph that touches memory
on the wire, or reads memory of another step, always gives NaN or wrong numbers here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.ir.core.collectives import (
    BY_MEMBERS,
    group_of,
    is_start,
    is_wait,
    kind_of,
    memory_on_wire,
    result_of_start,
    tables_of,
)
from commfuse_fx.ir.core.declared_specs import is_declared
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.member_ops import Tables
from commfuse_fx.ir.core.meta import Stretch, info, spec_of, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.ir.ops.unwritten import is_unwritten
from commfuse_fx.ir.updates.update_layout import takes_blocks, unequal_blocks
from commfuse_fx.runtime.execute.code.recorded import as_recorded, computed, proven
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.virtual.exchanges import COPIES_ITS_INPUT, EXCHANGE, IN_PLACE, Tensors, own_part
from commfuse_fx.virtual.rank_streams import RankStreams

Observer = Callable[[fx.Node, Sequence[Mapping[fx.Node, Any]]], None]
"""A function that is called with each node after all ranks have run it, and with each rank's values so far."""


class RanksProgram:
    """Runs the steps of one program on all ranks.

    executors: one per rank of the program's mesh, with bound storage. The program updates parameters, states and
        buffers in place, so ranks must not share them.

    Nodes of the tail run in the following step, just before the node that they have to precede. `finish` runs the
    rest of them.
    """

    def __init__(self, program: Program, executors: Sequence[Executor]) -> None:
        self.program = program
        self.executors = executors
        nodes = list(program.graph.nodes)
        self.starts = {info(node).name: node for node in nodes if is_start(node)}
        self.body = [node for node in nodes if info(node).next_step is None]
        self.deferred = [node for node in nodes if info(node).next_step is not None]
        self.until = {info(node).next_step: number + 1 for number, node in enumerate(self.deferred)}
        order = [*self.body, *self.deferred]
        self.dead_after = _last_uses(order)
        self.kept = [node for node in nodes if node.op == "call_function" and info(node).kept]
        self.memory_dead_after = _last_uses_of_memory(order, self.kept, Roots(program.graph, program.aliases()))
        self.computed = computed(program)
        self.proofs = {node: proven(node) for node in nodes if is_declared(node)}
        self.observe: Observer | None = None
        self._left: _Step | None = None
        self._next = 0

    @property
    def is_pending(self) -> bool:
        """Whether nodes of the last step's tail have not run yet."""
        return self._left is not None

    def step(self, inputs: Sequence[Mapping[str, torch.Tensor]], drop: Collection[str] = ()) -> list[tuple[Any, ...]]:
        """Run one step of every rank; returns each rank's outputs, (loss, *gradients, *auxiliary outputs).

        inputs: for each rank, the leaves of its call's arguments.
        drop: names of collectives of this step to leave out, as in the canonical text. A dropped one does not
            communicate: every rank goes on with its own data, in the right shape.

        Raises ConfigValueError if a name in `drop` is not that of a collective. If the step itself raises, the tail of
        the step before has been finished.
        """
        for name in drop:
            if name not in self.starts:
                raise ConfigValueError(
                    f"drop={name!r} is not a collective of this program: choose from {list(self.starts)}"
                )
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
            if not self.is_pending:
                for rank in range(len(self.executors)):
                    for node in self.kept:
                        _poison(self.memory(node, rank))
            step = _Step(self, inputs, [self.starts[name] for name in drop])
            try:
                for node in self.body:
                    self._advance(self.until.get(node, 0))
                    step.run(node)
            except BaseException:
                self._advance(len(self.deferred))
                for executor in self.executors:
                    executor.storage.pool.forget_memory()
                raise
            if self.deferred:
                self._left, self._next = step, 0
            return step.outputs

    def finish(self) -> None:
        """Run the rest of the last step's tail."""
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
            self._advance(len(self.deferred))

    def memory(self, node: fx.Node, rank: int) -> torch.Tensor:
        """The memory that a node for kept memory yields on a rank, the same in every step."""
        return self.executors[rank].storage.pool.memory(info(node).name, tensor_spec(node))

    def _advance(self, until: int) -> None:
        """Run the deferred nodes of the step before, up to number `until`, that have not run yet."""
        while self._left is not None and self._next < until:
            self._left.run(self.deferred[self._next])
            self._next += 1
            if self._next == len(self.deferred):
                self._left = None


def _last_uses(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values whose last user it is."""
    last = {value: node for node in order for value in node.all_input_nodes}
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        found.setdefault(node, []).append(value)
    return found


def _last_uses_of_memory(
    order: Sequence[fx.Node], kept: Sequence[fx.Node], roots: Roots
) -> dict[fx.Node, list[fx.Node]]:
    """For each node the kept memory whose last user in the step it is."""
    memory = dict.fromkeys(kept)
    last = {
        roots[value]: node
        for node in order
        for value in (*_on_wire(node), node, *node.all_input_nodes)
        if roots[value] in memory
    }
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        found.setdefault(node, []).append(value)
    return found


def _on_wire(node: fx.Node) -> tuple[fx.Node, ...]:
    """The memory that a collective reads until this wait, if it made no copy of it."""
    sent = memory_on_wire(node) if is_wait(node) else None
    return () if sent is None else (sent,)


class _Step:
    """One step of all ranks: its values, and its collectives on the wire."""

    def __init__(
        self, world: RanksProgram, inputs: Sequence[Mapping[str, torch.Tensor]], dropped: Collection[fx.Node]
    ) -> None:
        self.world = world
        self.program = program = world.program
        self.executors = world.executors
        self.dropped = dropped
        self.ranks = range(len(world.executors))
        self.values: list[dict[fx.Node, Any]] = [
            dict(zip(program.sources, executor.gather(given), strict=True))
            for executor, given in zip(world.executors, inputs, strict=True)
        ]
        self.arrivals: dict[fx.Node, list[Callable[[], object]]] = {}
        self.sent_in_pieces: dict[fx.Node, Tensors] = {}
        self.streams = RankStreams(program, world.executors[0].seed)
        self.outputs: list[tuple[Any, ...]] = []

    def run(self, node: fx.Node) -> None:
        if node.op == "output":
            self.outputs = [tuple(self._arguments(node.args[0], rank)) for rank in self.ranks]
        elif is_start(node):
            self._start(node)
        elif is_wait(node):
            self._wait(node)
        elif node.op != "placeholder":
            for rank in self.ranks:
                self.values[rank][node] = self._compute(node, rank)
        if self.world.observe is not None and node.op != "output":
            self.world.observe(node, self.values)
        for start, stretch in info(node).sends:
            self._send(start, (stretch,))
        for value in self.world.dead_after.get(node, ()):
            for values in self.values:
                del values[value]
        for memory in self.world.memory_dead_after.get(node, ()):
            for rank in self.ranks:
                _poison(self.world.memory(memory, rank))

    def _arguments(self, value: Any, rank: int) -> Any:
        return fx.node.map_arg(value, self.values[rank].__getitem__)

    def _compute(self, node: fx.Node, rank: int) -> Any:
        if node.op == "get_attr":
            return self.program.constants[str(node.target)]
        if info(node).kept:
            return self.world.memory(node, rank)
        function: Any = self.executors[rank].wire.bind(node) or node.target
        if node.target is optimizer_step:
            function = self.executors[rank].step_optimizer
        args, kwargs = self._arguments(node.args, rank), self._arguments(node.kwargs, rank)
        if takes_blocks(node) and (wrong := unequal_blocks([spec_of(arg) for arg in args])) is not None:
            raise VerificationError(f"{info(node).name} {wrong}")
        try:
            if draws_random_numbers(node):
                result = self.streams.draw(rank, lambda: function(*args, **kwargs))
            else:
                result = function(*args, **kwargs)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"on rank {rank} at {info(node).name} {info(node).source}")
            raise
        if is_unwritten(node):
            _poison(result)
        if (prove := self.world.proofs.get(node)) is not None:
            return prove(result)
        return as_recorded(result, info(node).spec) if node in self.world.computed else result

    def _start(self, node: fx.Node) -> None:
        if info(node).rest:
            self._send(node, info(node).rest)
            for values, result in zip(self.values, self.sent_in_pieces.pop(node), strict=True):
                values[node] = result
            return
        arguments = [self._arguments(node.args, rank) for rank in self.ranks]
        for values, result in zip(self.values, self._issue(node, arguments), strict=True):
            values[node] = result

    def _send(self, start: fx.Node, stretches: Sequence[Stretch]) -> None:
        """Put parts of a bucket onto the wire, each as a message of its own."""
        arguments = [self._arguments(start.args, rank) for rank in self.ranks]
        tables = tables_of(start)
        if tables is None:
            assert start.target in IN_PLACE, "only what is reduced where it lies can be sent in pieces, and rows"
            self.sent_in_pieces[start] = [args[0] for args in arguments]
            for stretch in stretches:
                self._issue(start, [(args[0][stretch.begin : stretch.end], *args[1:]) for args in arguments])
            return
        if start not in self.sent_in_pieces:
            self.sent_in_pieces[start] = [result_of_start(start.target, args) for args in arguments]
            for out in self.sent_in_pieces[start]:
                _poison(out)
        for stretch in stretches:
            self._send_rows(start, tables, stretch, arguments)

    def _send_rows(self, start: fx.Node, tables: Tables, stretch: Stretch, arguments: Sequence[Sequence[Any]]) -> None:
        """Exchange a stretch of what each rank has of the rows, and put it into its place once it has arrived."""
        gathers, sizes = kind_of(start) == "all_gather", [stretch.size]
        messages: list[Sequence[Any]] = []
        for value, *args in arguments:
            flat = value.reshape(-1)
            given = flat[stretch.begin : stretch.end] if gathers else tables.message(flat, stretch).reshape(-1)
            messages.append((given, *args[:-1], sizes) if start.target in BY_MEMBERS.values() else (given, *args))
        for out, result in zip(self.sent_in_pieces[start], self._issue(start, messages), strict=True):
            flat = out.view(-1)
            if gathers:
                self.arrivals[start].append(partial(tables.put, flat, stretch, result.view(tables.ways, stretch.size)))
            else:
                self.arrivals[start].append(partial(flat[stretch.begin : stretch.end].copy_, result))

    def _issue(self, node: fx.Node, arguments: Sequence[Sequence[Any]]) -> Tensors:
        """Allocate and poison every rank's result, and note how to fill it."""
        exchange = EXCHANGE[node.target]
        group = group_of(node)
        given: Tensors = [args[0] for args in arguments]
        if node.target in COPIES_ITS_INPUT:
            given = [value.clone() for value in given]
        results = [result_of_start(node.target, args) for args in arguments]
        if (prove := self.world.proofs.get(node)) is not None and not info(node).rest:
            results = list(map(prove, results))
        arrivals = self.arrivals.setdefault(node, [])
        for rank in self.ranks:
            members = self.program.mesh.ranks(group, rank)
            mine = members.index(rank)
            out, args = results[rank], arguments[rank][1:]
            sent = [given[rank]] * len(members) if node in self.dropped else [given[member] for member in members]
            operation = own_part if node in self.dropped else exchange
            arrivals.append(_arrival(operation, out, sent, mine, args))
        for out in results:
            _poison(out)
        return results

    def _wait(self, node: fx.Node) -> None:
        start = node.args[0]
        assert isinstance(start, fx.Node)
        for arrive in self.arrivals.pop(start):
            arrive()
        for values in self.values:
            values[node] = values[start]


def _arrival(
    operation: Callable[..., None], out: torch.Tensor, sent: Tensors, mine: int, args: Sequence[Any]
) -> Callable[[], None]:
    return lambda: operation(out, sent, mine, *args)


def _poison(value: torch.Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype == torch.bool:
        value.fill_(True)  # it may be the right value; at least it is the same on every rank and in every run
    else:
        value.fill_(torch.iinfo(value.dtype).min)
