"""Let every training step begin with rank 0's buffers, as DistributedDataParallel does with broadcast_buffers=True.

Where the caller starts the backward, they are sent in the backward, for the next forward.

Why: docs/decisions.md, "Rank 0's buffers are sent in the backward of a module".
Why: docs/decisions.md, "BatchNorm statistics stay on their rank, unless you ask".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.halves import split
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, TensorSpec, info, set_info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation

_SENT_AS_THEY_ARE = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""What Gloo and NCCL both send. Other dtypes go as bytes."""


@dataclass(frozen=True)
class BroadcastBuffers(Pass):
    """The first rank of `group` sends its buffers at the top of the step; readers and the values written back at its
    end follow from what arrives. A group of None or of one rank sends nothing, and so does an evaluation."""

    name = "broadcast_buffers"
    numerics = "defines"
    requires = ("simplified",)

    group: str | None

    @classmethod
    def when(cls, situation: Situation) -> BroadcastBuffers | None:
        if situation.divides:
            return None
        return cls(situation.reduced_group if situation.config.broadcast_buffers else None)

    def __call__(self, program: Program) -> bool:
        if not program.training or self.group is None or program.mesh.size(self.group) == 1:
            return False
        buffers = [node for node, source in program.sources.items() if source.kind == "buffer"]
        buffers = [node for node in buffers if tensor_spec(node).numel and _can_be_written(program, node)]
        if program.has_two_halves:
            return self._send_behind(program, buffers)
        places = _Places(program.graph)
        build = Builder(program)
        sent = [_Sent(build, buffer, self.group, number) for number, buffer in enumerate(buffers)]
        arrived = [each.rewrite(places) for each in sent]
        for each, value in zip(sent, arrived, strict=True):
            each.write_back(value, places.end)
        return bool(buffers)

    def _send_behind(self, program: Program, buffers: list[fx.Node]) -> bool:
        """All buffers leave ahead of all gradients, and are written at the end of the backward. So ranks send in one
        order although their gradients may become ready in several, as in graphs for one size and for any. A buffer that
        the backward itself changes leaves after that."""
        begin, end = program.loss.next, program.output
        behind = split(program)[1]
        changed = dict.fromkeys(buffer for buffer in buffers if any(_writes_back(node, buffer) for node in behind))
        build = Builder(program)
        sent = [_Sent(build, buffer, str(self.group), number) for number, buffer in enumerate(buffers)]
        starts = [each.start(end if each.buffer in changed else begin) for each in sent]
        for each, start in zip(sent, starts, strict=True):
            each.write(each.arrive(start, end), end)
        return bool(buffers)


class _Places:
    """Where nodes stand before the pass: `top` is the first one that is no input, `end` the first of the update."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.top = next(node for node in self.nodes if node.op != "placeholder")
        self.end = next(node for node in self.nodes if node.op != "placeholder" and info(node).phase == "update")

    def first_reader(self, users: list[fx.Node]) -> fx.Node:
        """The first of these nodes, at the end of the backward at the latest."""
        place = min(self.position[node] for node in (*users, self.end))
        return self.nodes[place]


class _Sent:
    """One buffer. Its start stands at the top of the graph, its wait where it is first read."""

    def __init__(self, build: Builder, buffer: fx.Node, group: str, number: int) -> None:
        self.build = build
        self.buffer = buffer
        self.group = group
        self.number = number
        self.name = build.program.sources[buffer].name
        self.spec = _unexpanded(tensor_spec(buffer))
        phase = "backward" if build.program.has_two_halves else "forward"
        self.like = NodeInfo(phase, module=self.name.rpartition(".")[0])

    def rewrite(self, places: _Places) -> fx.Node:
        """Put the collective into the graph, and let everybody read what arrives. Returns that."""
        users = list(self.buffer.users)
        start = self.start(places.top)
        reader = places.first_reader(users)
        value = self.arrive(start, reader)
        with self.build.before(reader):
            read = self._expanded(value)
        for user in users:
            args = fx.node.map_arg(user.args, lambda node: read if node is self.buffer else node)
            user.args = (self.buffer, *args[1:]) if _writes_back(user, self.buffer) else args
            user.kwargs = fx.node.map_arg(user.kwargs, lambda node: read if node is self.buffer else node)
        return value

    def start(self, place: fx.Node) -> fx.Node:
        """Start the collective in front of a node."""
        with self.build.before(place):
            return self._start()

    def arrive(self, start: fx.Node, place: fx.Node) -> fx.Node:
        """Wait for it in front of a node. Returns what arrives."""
        with self.build.before(place):
            return self._arrived(self.build.wait(start, f"buffers/{self.name}/wait"))

    def write_back(self, value: fx.Node, place: fx.Node) -> None:
        """Let the buffer itself take rank 0's value, where the model does not write it anyway.

        Before whatever the model writes: another buffer may be a view of this one.
        """
        if any(_writes_back(user, self.buffer) for user in self.buffer.users):
            return
        self.write(value, place)

    def write(self, value: fx.Node, place: fx.Node) -> None:
        """Let the buffer take this value, in front of a node."""
        program = self.build.program
        with self.build.before(place):
            target = self._memory("memory")
            node = program.graph.call_function(aten.copy_.default, (target, value))
        set_info(node, info(value).derive(self.spec, phase="update"))
        info(node).name = program.names.reserve(f"update/{self.name}")

    def _start(self) -> fx.Node:
        value, spec = self._flat_where_needed()
        collective = CollectiveInfo(
            "broadcast",
            group=self.group,
            dtype=spec.dtype,
            nbytes=spec.nbytes,
            members=(self.name,),
            sequence=self.number,
            role="buffer",
        )
        args = (value, 0, self.group)
        name = f"buffers/{self.name}/broadcast"
        return self._call(c10d.broadcast.default, args, spec, name, collective=collective)

    def _flat_where_needed(self) -> tuple[fx.Node, TensorSpec]:
        """What is sent: the buffer if it is contiguous, else its elements in one dimension, in the order of memory."""
        value, spec = self._memory("sent"), self.spec
        flat = TensorSpec.flat(spec.numel, spec)
        if not spec.is_dense:
            whole = spec.with_shape(spec.shape)
            kwargs = {"memory_format": torch.contiguous_format}
            value = self._call(aten.clone.default, (value,), whole, f"buffers/{self.name}/row_major", kwargs=kwargs)
            value = self._call(aten.view.default, (value, [-1]), flat, f"buffers/{self.name}/flat")
        elif not spec.is_contiguous or self._goes_as_bytes:
            value = self._call(aten.as_strided.default, (value, [spec.numel], [1]), flat, f"buffers/{self.name}/flat")
        else:
            return value, spec
        if self._goes_as_bytes:
            flat = TensorSpec((spec.nbytes,), torch.uint8, (1,), spec.device)
            value = self._call(aten.view.dtype, (value, torch.uint8), flat, f"buffers/{self.name}/bytes")
        return value, flat

    def _memory(self, label: str) -> fx.Node:
        """The buffer; of one that was expanded, each of its elements once."""
        spec = self.spec
        if spec == tensor_spec(self.buffer):
            return self.buffer
        args = (self.buffer, list(spec.shape), list(spec.stride))
        return self._call(aten.as_strided.default, args, spec, f"buffers/{self.name}/{label}")

    def _expanded(self, value: fx.Node) -> fx.Node:
        """What readers get for this value of `_memory`."""
        spec = tensor_spec(self.buffer)
        if spec == self.spec:
            return value
        strides = zip(spec.stride, tensor_spec(value).stride, strict=True)
        spec = TensorSpec(spec.shape, spec.dtype, tuple(s and have for s, have in strides), spec.device)
        return self._call(aten.expand.default, (value, list(spec.shape)), spec, f"buffers/{self.name}/expanded")

    def _arrived(self, value: fx.Node) -> fx.Node:
        """The buffer's shape and strides again; row-major where it had gaps."""
        spec = self.spec if self.spec.is_dense else self.spec.with_shape(self.spec.shape)
        if self._goes_as_bytes:
            # A copy, since a part of a fused message may begin where no element of this dtype can.
            have = tensor_spec(value)
            value = self._call(aten.clone.default, (value,), have, f"buffers/{self.name}/own")
            flat = TensorSpec.flat(spec.numel, spec)
            value = self._call(aten.view.dtype, (value, spec.dtype), flat, f"buffers/{self.name}/elements")
        if tensor_spec(value) == spec:
            return value
        args = (value, list(spec.shape), list(spec.stride))
        return self._call(aten.as_strided.default, args, spec, f"buffers/{self.name}/value")

    @property
    def _goes_as_bytes(self) -> bool:
        return self.spec.dtype not in _SENT_AS_THEY_ARE

    def _call(self, target: object, args: tuple[object, ...], spec: TensorSpec, name: str, **fields: Any) -> fx.Node:
        return self.build.call(target, args, spec=spec, like=self.like, name=name, **fields)


def _unexpanded(spec: TensorSpec) -> TensorSpec:
    """Without the copies that `expand` makes of an element, which are the same memory."""
    shape = tuple(1 if stride == 0 else size for size, stride in zip(spec.shape, spec.stride, strict=True))
    return TensorSpec(shape, spec.dtype, spec.stride, spec.device)


def _can_be_written(program: Program, buffer: fx.Node) -> bool:
    """Whether other ranks may write to it, and its elements, but for expanded ones, lie apart: torch refuses to write
    several into one place."""
    if program.sources[buffer].name in program.own_buffers:
        program.note("not broadcast", info(buffer).name, "it is marked layerwise_parallel")
        return False
    if _unexpanded(tensor_spec(buffer)).may_overlap:
        program.note("not broadcast", info(buffer).name, "its elements overlap in memory, so it cannot be written")
        return False
    return True


def _writes_back(node: fx.Node, buffer: fx.Node) -> bool:
    """Whether this is the copy at the end of the step that gives the buffer the value that the model has computed."""
    return node.target is aten.copy_.default and node.args[0] is buffer and info(node).phase == "update"
