"""The wire binds the collectives of a graph to torch.distributed, which starts them asynchronously.

Why: docs/decisions.md, "A step on CUDA does not let the host wait".
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import CollectiveError
from commfuse_fx.ir.core.collectives import (
    collective_of,
    group_of,
    is_start,
    is_wait,
    kind_of,
    result_of_start,
    tables_of,
)
from commfuse_fx.ir.core.functions import axis_index
from commfuse_fx.ir.core.meta import Stretch, info
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import collective_text
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.runtime.execute.wire.messages import DEPEND_ON_ORDER, ISSUE, Flight, gather, scatter
from commfuse_fx.runtime.ranks.distress import Distress, keep_forever
from commfuse_fx.runtime.ranks.groups import Groups


class Wire:
    """The collectives of one program on this rank. `groups` is None where the program has none."""

    def __init__(self, program: Program, groups: Groups | None, rank: int) -> None:
        self.program = program
        self.groups = groups
        self.rank = rank
        self.timeline: Timeline | None = None
        self.distress: Distress | None = None
        self.is_of_replay = False
        """Whether the step itself is complete, and these are the collectives of its replay."""
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
        rest = info(node).rest
        if not rest:
            return self._issuer(node, ISSUE[node.target])
        send = self._sender(node)

        def start_rest(value: torch.Tensor, *args: Any) -> torch.Tensor:
            for stretch in rest:
                out = send(value, stretch)
            return out

        return start_rest

    def _bind_piece(self, start: fx.Node, stretch: Stretch) -> Callable[[torch.Tensor], None]:
        send = self._sender(start)

        def send_piece(value: torch.Tensor) -> None:
            send(value, stretch)

        return send_piece

    def _sender(self, node: fx.Node) -> Callable[[torch.Tensor, Stretch], torch.Tensor]:
        """A function that sends a stretch of a collective, and gives what its wait yields: memory that it works on in
        place, or else one result for all stretches."""
        args, tables = node.args[1:], tables_of(node)
        if tables is None:
            in_place = self._issuer(node, ISSUE[node.target])

            def send_memory(storage: torch.Tensor, stretch: Stretch) -> torch.Tensor:
                in_place(storage[stretch.begin : stretch.end], *args)
                return storage

            return send_memory
        if kind_of(node) == "all_gather":
            issue = self._issuer(node, lambda group, ranks, x, stretch, out: gather(group, x, tables, stretch, out))
        else:
            op = str(args[0])
            issue = self._issuer(
                node, lambda group, ranks, x, stretch, out: scatter(group, x, op, tables, stretch, out)
            )

        def send_rows(value: torch.Tensor, stretch: Stretch) -> torch.Tensor:
            flown = self._pending.get(node)
            out = flown[0].out if flown else result_of_start(node.target, (value, *args))
            return issue(value, stretch, out)

        return send_rows

    def _issuer(self, node: fx.Node, issue: Callable[..., Flight]) -> Callable[..., torch.Tensor]:
        """A function that hands the collective of a start, or one piece of it, to the backend: what `issue` makes of
        the group, its ranks and the arguments."""
        assert self.groups is not None, "a collective needs process groups"
        if node.target in DEPEND_ON_ORDER:
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
        if self.is_of_replay:
            left = "The step itself is complete on this rank, and this was its replay, for step.verify()."
        elif info(node).phase == "update":
            left = "This rank has updated its own part, and has none of those of the other ranks: load a checkpoint."
        return CollectiveError(
            f"rank {self.rank}: {info(node).name} failed: {self._describe(node)}. "
            f"Another rank has died, is stuck or left the step early; its own output says why. {left} "
            f"[{type(error).__name__}: {error}]"
        )


def _nothing_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor like this one without rows, which does not keep its memory."""
    return x.new_empty_strided((0, *x.shape[1:]), x.stride())
