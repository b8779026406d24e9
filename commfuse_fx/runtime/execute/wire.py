"""The wire binds the collectives of a graph to torch.distributed, which starts them asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commfuse_fx.errors import CollectiveError
from commfuse_fx.ir.collectives import c10d, collective_of, group_of, is_start, is_wait
from commfuse_fx.ir.functions import axis_index
from commfuse_fx.ir.meta import Stretch, info
from commfuse_fx.ir.owner_ops import of_owner, reduce, reduce_
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import collective_text
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.runtime.ranks.distress import Distress, keep_forever
from commfuse_fx.runtime.ranks.groups import Groups
from commfuse_fx.support.renamed import all_gather_single, reduce_scatter_single

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor: the tensor itself if it is contiguous, else a one-dimensional view."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class Flight:
    """A collective that has been started.

    out: the tensor that its wait yields. work: the handle of the backend. tensors: the tensors that the backend uses.
    finish: what is left to do once the backend is done, as often as anybody waits.
    """

    out: torch.Tensor
    work: Any
    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[], None] = lambda: None


class Wire:
    """The collectives of one program on this rank. `groups` is None where the program has none."""

    def __init__(self, program: Program, groups: Groups | None, rank: int) -> None:
        self.program = program
        self.groups = groups
        self.rank = rank
        self.timeline: Timeline | None = None
        self.distress: Distress | None = None
        self.buffers_from: int | None = None
        """The rank that sends its buffers to the others; None for the first rank of the group."""
        # The collectives on the wire: start -> its pieces. A bucket that is not streamed is one piece.
        self._pending: dict[fx.Node, list[Flight]] = {}

    def bind(self, node: fx.Node) -> Callable[..., Any] | None:
        """The callable for a collective, a wait or a coordinate; None for any other node."""
        if is_start(node):
            return self._bind_start(node)
        if is_wait(node):
            return self._bind_wait(node)
        if node.target is axis_index:
            index = self.program.mesh.index(str(node.args[0]), self.rank)
            return lambda group: index
        if node.target is torch.ops.commfuse.zero_unless_source.default:
            mine = self.program.mesh.index(str(node.args[2]), self.rank)
            return lambda x, src, group: x if mine == src else torch.zeros_like(x)
        if node.target is of_owner:
            is_mine = self.program.mesh.index(str(node.args[3]), self.rank) == node.args[1]
            return lambda x, *args: x if is_mine else _nothing_of(x)
        return None

    def abandon(self) -> None:
        """Forget collectives that were started in a step that failed. They may still be running."""
        for flight in (flight for flights in self._pending.values() for flight in flights):
            for thing in (flight.work, *flight.tensors):
                keep_forever(thing)
        self._pending.clear()

    def forget(self) -> None:
        """Forget collectives that were only recorded, and never sent."""
        self._pending.clear()

    def sends(self) -> dict[fx.Node, list[tuple[Callable[[torch.Tensor], None], fx.Node]]]:
        """For each node that completes pieces of buckets: functions that send them, with the node of the bucket."""
        found: dict[fx.Node, list[tuple[Callable[[torch.Tensor], None], fx.Node]]] = {}
        for node in self.program.graph.nodes:
            for start, stretch in info(node).sends:
                storage = start.args[0]
                assert isinstance(storage, fx.Node)
                found.setdefault(node, []).append((self._bind_piece(start, stretch), storage))
        return found

    def _bind_start(self, node: fx.Node) -> Callable[..., Any]:
        issue = self._issuer(node)
        rest = info(node).rest
        if not rest:
            return issue

        def start_rest(storage: torch.Tensor, *args: Any) -> torch.Tensor:
            for stretch in rest:
                issue(storage[stretch.begin : stretch.end], *args)
            return storage

        return start_rest

    def _bind_piece(self, start: fx.Node, stretch: Stretch) -> Callable[[torch.Tensor], None]:
        issue = self._issuer(start)
        args = start.args[1:]

        def send(storage: torch.Tensor) -> None:
            issue(storage[stretch.begin : stretch.end], *args)

        return send

    def _issuer(self, node: fx.Node) -> Callable[..., torch.Tensor]:
        """A function that hands the collective of a start, or one piece of it, to the backend."""
        assert self.groups is not None, "a collective needs process groups"
        issue = _ISSUE[node.target]
        if node.target in _DEPEND_ON_ORDER:
            self.groups.check_order(group_of(node))
        group = self.groups[group_of(node)]
        ranks = self.program.mesh.ranks(group_of(node), self.rank)
        name, description = info(node).name, self._describe(node)
        is_streamed = bool(info(node).rest)
        details = info(node).collective
        sends_buffers = details is not None and details.role == "buffer"

        def hand_over(*args: Any) -> torch.Tensor:
            if sends_buffers and self.buffers_from is not None:
                args = (args[0], ranks.index(self.buffers_from), *args[2:])
            since = perf_counter()
            try:
                flight = issue(group, ranks, *args)
            except RuntimeError as error:
                raise self._failure(node, error) from error
            pieces = self._pending.setdefault(node, [])
            pieces.append(flight)
            if self.timeline is not None:
                label = f"{name}.{len(pieces) - 1}" if is_streamed else name
                key, on_device = (node, len(pieces) - 1), flight.out.is_cuda
                self.timeline.issued(key, label, description, since, flight.work, on_device)
            return flight.out

        return hand_over

    def _bind_wait(self, node: fx.Node) -> Callable[..., Any]:
        start = node.args[0]
        assert isinstance(start, fx.Node)

        def wait(value: torch.Tensor) -> torch.Tensor:
            # If Ctrl-C comes just after this wait, the wait runs again and finds nothing pending.
            self._wait(start)
            self._pending.pop(start, None)
            return value

        return wait

    def _wait(self, start: fx.Node) -> None:
        for number, flight in enumerate(self._pending.get(start, ())):
            work = flight.work
            if self.distress is not None and flight.out.is_cpu:
                work = self.distress.heed(work)
            try:
                if self.timeline is None:
                    work.wait()
                else:
                    self.timeline.wait((start, number), work)
            except RuntimeError as error:
                raise self._failure(start, error) from error
            flight.finish()

    def complete(self) -> None:
        """Wait for whatever is on the wire. The graph's own waits come later, and find it done."""
        for start in self._pending:
            self._wait(start)

    def _describe(self, node: fx.Node) -> str:
        details = collective_of(node)
        return f"{details.kind} {collective_text(details, self.program.mesh.size(details.group))}"

    def _failure(self, node: fx.Node, error: RuntimeError) -> CollectiveError:
        left = "Parameters and optimizer state on this rank are as before this step."
        if info(node).phase == "update":
            left = "This rank has updated its own part, and has none of those of the other ranks: load a checkpoint."
        return CollectiveError(
            f"rank {self.rank}: {info(node).name} failed: {self._describe(node)}. "
            f"Another rank has died, is stuck or left the step early; its own output says why. {left} "
            f"[{type(error).__name__}: {error}]"
        )


def _all_reduce(group: Any, ranks: Any, x: torch.Tensor, op: str, axes: str) -> Flight:
    return _all_reduce_in_place(group, ranks, x.clone(), op, axes)


def _all_reduce_in_place(group: Any, ranks: Any, x: torch.Tensor, op: str, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.all_reduce(block, _REDUCE_OPS[op], group, async_op=True), (block,))


def _all_gather(group: Any, ranks: Any, x: torch.Tensor, size: int, axes: str) -> Flight:
    given, out = x.contiguous(), x.new_empty((x.shape[0] * size, *x.shape[1:]))
    return Flight(out, all_gather_single(out, given, group, async_op=True), (given, out))


def _reduce_scatter(group: Any, ranks: Any, x: torch.Tensor, op: str, size: int, axes: str) -> Flight:
    if x.is_cpu and op == "sum":
        return _exchange_and_add(group, x, size)
    given, out = x.contiguous(), x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return Flight(out, reduce_scatter_single(out, given, _REDUCE_OPS[op], group, async_op=True), (given, out))


def _exchange_and_add(group: Any, x: torch.Tensor, size: int) -> Flight:
    """A reduce_scatter by an all_to_all: Gloo's own one reduces all of it on every rank, which sends twice as much."""
    given = x.contiguous()
    received = torch.empty_like(given)
    work = dist.all_to_all_single(received, given, group=group, async_op=True)
    out, left = x.new_empty((x.shape[0] // size, *x.shape[1:])), [received]

    def add() -> None:
        if left:  # in the order of the ranks
            first, second, *others = left.pop().chunk(size)
            torch.add(first, second, out=out)
            for row in others:
                out.add_(row)

    return Flight(out, work, (given, received), add)


def _nothing_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor like this one without rows, which does not keep its memory."""
    return x.new_empty_strided((0, *x.shape[1:]), x.stride())


def _broadcast(group: Any, ranks: Any, x: torch.Tensor, src: int, axes: str) -> Flight:
    return _broadcast_in_place(group, ranks, x.clone(), src, axes)


def _broadcast_in_place(group: Any, ranks: Any, x: torch.Tensor, src: int, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.broadcast(block, ranks[src], group, async_op=True), (block,))


def _reduce(group: Any, ranks: Any, x: torch.Tensor, op: str, owner: int, axes: str) -> Flight:
    return _reduce_in_place(group, ranks, x.clone(), op, owner, axes)


def _reduce_in_place(group: Any, ranks: Any, x: torch.Tensor, op: str, owner: int, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.reduce(block, ranks[owner], _REDUCE_OPS[op], group, async_op=True), (block,))


def _all_to_all(group: Any, ranks: Any, x: torch.Tensor, outputs: list[int], inputs: list[int], axes: str) -> Flight:
    given, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    return Flight(out, dist.all_to_all_single(out, given, outputs, inputs, group, async_op=True), (given, out))


_ISSUE: dict[Any, Callable[..., Flight]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce_in_place,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.broadcast.default: _broadcast,
    c10d.broadcast_.default: _broadcast_in_place,
    c10d.all_to_all_single.default: _all_to_all,
    reduce: _reduce,
    reduce_: _reduce_in_place,
}

_DEPEND_ON_ORDER = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
)
"""Collectives whose results depend on the order of the ranks in their group."""
