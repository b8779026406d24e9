"""Run one program for all ranks in one process, node by node, with no devices and no process groups.

Collectives are carried out on the list of the ranks' tensors, with the worst timing that a real
network could have: the result of a start is poisoned until its wait, and what is sent is read at the wait
where the runtime does not copy it at the start. A graph that touches memory on the wire gives NaN or
wrong numbers here, every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.collectives import c10d, group_of, is_start, is_wait
from commfuse_fx.ir.dependence import draws_random_numbers
from commfuse_fx.ir.functions import optimizer_step
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program, Source
from commfuse_fx.runtime.executor import seed_of_rank
from commfuse_fx.runtime.wire import Wire

Tensors = list[torch.Tensor]
StepOptimizer = Callable[[Sequence[Any], Sequence[torch.Tensor]], None]


def run_lockstep(
    program: Program,
    rank_inputs: Sequence[Mapping[Source, Any]],
    *,
    step_optimizers: Sequence[StepOptimizer] = (),
    drop: Collection[str] = (),
) -> list[tuple[Any, ...]]:
    """Execute `program` on every rank of its mesh; returns each rank's outputs, (loss, *gradients).

    rank_inputs: for each rank, the value of every placeholder. Values that the program updates
        (parameters, state, buffers) are updated in place, so ranks must not share them.
    step_optimizers: for each rank, what an opaque optimizer node calls with parameters and gradients.
    drop: names of collectives to leave out, as in the canonical text. A dropped one does not
        communicate: every rank goes on with its own data, in the right shape.

    Raises ConfigValueError when the number of ranks is not that of the mesh, or a name in `drop` is not
    that of a collective.
    """
    world = program.mesh.world
    if len(rank_inputs) != world:
        raise ConfigValueError(f"{len(rank_inputs)} ranks' inputs for a mesh of {world} devices: give one per rank")
    starts = {info(node).name: node for node in program.graph.nodes if is_start(node)}
    for name in drop:
        if name not in starts:
            raise ConfigValueError(f"drop={name!r} is not a collective of this program: choose from {list(starts)}")
    with torch.no_grad(), torch._C._DisableAutocast():
        return _Lockstep(program, rank_inputs, step_optimizers, [starts[name] for name in drop]).run()


class _Lockstep:
    def __init__(
        self,
        program: Program,
        rank_inputs: Sequence[Mapping[Source, Any]],
        step_optimizers: Sequence[StepOptimizer],
        dropped: Collection[fx.Node],
    ) -> None:
        self.program = program
        self.rank_inputs = rank_inputs
        self.step_optimizers = step_optimizers
        self.dropped = dropped
        self.ranks = range(program.mesh.world)
        self.wires = [Wire(program, None, rank) for rank in self.ranks]
        self.values: list[dict[fx.Node, Any]] = [{} for _ in self.ranks]
        self.arrivals: dict[fx.Node, list[Callable[[], None]]] = {}
        self.streams = _RankStreams(program)

    def run(self) -> list[tuple[Any, ...]]:
        last_use = {value: node for node in self.program.graph.nodes for value in node.all_input_nodes}
        for node in self.program.graph.nodes:
            if node.op == "output":
                return [tuple(self._arguments(node.args[0], rank)) for rank in self.ranks]
            if is_start(node):
                self._start(node)
            elif is_wait(node):
                self._wait(node)
            else:
                for rank in self.ranks:
                    self.values[rank][node] = self._compute(node, rank)
            for value in node.all_input_nodes:
                if last_use[value] is node:
                    for values in self.values:
                        del values[value]
        raise AssertionError("a graph ends with its output")

    def _arguments(self, value: Any, rank: int) -> Any:
        return fx.node.map_arg(value, self.values[rank].__getitem__)

    def _compute(self, node: fx.Node, rank: int) -> Any:
        if node.op == "placeholder":
            return self.rank_inputs[rank][self.program.sources[node]]
        if node.op == "get_attr":
            return self.program.constants[str(node.target)]
        function: Any = self.wires[rank].bind(node) or node.target
        if node.target is optimizer_step:
            function = self.step_optimizers[rank]
        args, kwargs = self._arguments(node.args, rank), self._arguments(node.kwargs, rank)
        try:
            if draws_random_numbers(node.target):
                return self.streams.draw(rank, lambda: function(*args, **kwargs))
            return function(*args, **kwargs)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"on rank {rank} at {info(node).name} {info(node).source}")
            raise

    def _start(self, node: fx.Node) -> None:
        """Allocate and poison every rank's result, and note how to fill it."""
        exchange = _EXCHANGE[node.target]
        group = group_of(node)
        arguments = [self._arguments(node.args, rank) for rank in self.ranks]
        given: Tensors = [args[0] for args in arguments]
        if node.target in _COPIES_ITS_INPUT:
            given = [value.clone() for value in given]
        results = [_result(node, args) for args in arguments]
        self.arrivals[node] = []
        for rank in self.ranks:
            members = self.program.mesh.ranks(group, rank)
            mine = members.index(rank)
            out, args = results[rank], arguments[rank][1:]
            self.values[rank][node] = out
            sent = [given[rank]] * len(members) if node in self.dropped else [given[member] for member in members]
            operation = _own_part if node in self.dropped else exchange
            self.arrivals[node].append(_arrival(operation, out, sent, mine, args))
        for out in results:
            _poison(out)

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


def _result(node: fx.Node, args: Sequence[Any]) -> torch.Tensor:
    """Where a start puts its result: its own input for the in-place forms."""
    value: torch.Tensor = args[0]
    if node.target in _IN_PLACE:
        return value
    if node.target is c10d.all_gather_into_tensor.default:
        return value.new_empty((value.shape[0] * args[1], *value.shape[1:]))
    if node.target is c10d.reduce_scatter_tensor.default:
        return value.new_empty((value.shape[0] // args[2], *value.shape[1:]))
    return torch.empty_like(value)


def _poison(value: torch.Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype != torch.bool:
        value.fill_(torch.iinfo(value.dtype).min)


_REDUCE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _reduce(values: Tensors, op: str) -> torch.Tensor:
    """In rank order, in the tensors' own dtype."""
    total = values[0]
    for value in values[1:]:
        total = _REDUCE[op](total, value)
    return total / len(values) if op == "avg" else total


# Each fills one rank's result. `sent`: what the group's ranks send, in order; `mine`: this rank's place in it.


def _all_reduce(out: torch.Tensor, sent: Tensors, mine: int, op: str, group: str) -> None:
    out.copy_(_reduce(sent, op))


def _all_gather(out: torch.Tensor, sent: Tensors, mine: int, size: int, group: str) -> None:
    out.copy_(torch.cat(sent))


def _reduce_scatter(out: torch.Tensor, sent: Tensors, mine: int, op: str, size: int, group: str) -> None:
    out.copy_(_reduce([value.chunk(size)[mine] for value in sent], op))


def _broadcast(out: torch.Tensor, sent: Tensors, mine: int, src: int, group: str) -> None:
    out.copy_(sent[src])


def _all_to_all(out: torch.Tensor, sent: Tensors, mine: int, outputs: list[int], inputs: list[int], group: str) -> None:
    out.copy_(torch.cat([value.split(inputs)[mine] for value in sent]))


def _own_part(out: torch.Tensor, sent: Tensors, mine: int, *args: Any) -> None:
    """A dropped collective: this rank's own data, repeated or sliced to the shape of the result."""
    own = sent[mine]
    if own.shape == out.shape:
        out.copy_(own)
    elif own.shape[0] < out.shape[0]:
        out.copy_(torch.cat([own] * len(sent)))
    else:
        out.copy_(own.chunk(len(sent))[mine])


_EXCHANGE: dict[Any, Callable[..., None]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.broadcast.default: _broadcast,
    c10d.broadcast_.default: _broadcast,
    c10d.all_to_all_single.default: _all_to_all,
}

_IN_PLACE = (c10d.all_reduce_.default, c10d.broadcast_.default)
_COPIES_ITS_INPUT = (*_IN_PLACE, c10d.all_reduce.default, c10d.broadcast.default)


class _RankStreams:
    """A random stream per rank, the same numbers as the ranks' own processes draw when seeded alike."""

    def __init__(self, program: Program) -> None:
        self.states: dict[int, torch.Tensor] = {}
        world = program.mesh.world
        if world == 1 or not any(draws_random_numbers(node.target) for node in program.graph.nodes):
            return
        seed = int(torch.randint(0, 1 << 62, (1,)))
        for rank in range(world):
            self.states[rank] = torch.Generator().manual_seed(seed_of_rank(seed, rank)).get_state()

    def draw(self, rank: int, function: Callable[[], Any]) -> Any:
        if rank not in self.states:
            return function()
        held = torch.get_rng_state()
        torch.set_rng_state(self.states[rank])
        try:
            return function()
        finally:
            self.states[rank] = torch.get_rng_state()
            torch.set_rng_state(held)
