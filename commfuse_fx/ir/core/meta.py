"""Typed metadata of graph nodes.

Every node carries one `NodeInfo` under `node.meta["commfuse"]`. Fields are either *saved* (they
appear in dumps and in the fingerprint) or *scratch* (they help passes and error messages only).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import fx

PHASES = ("input", "forward", "backward", "update")

_KEY = "commfuse"

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Short stable name of a dtype, such as `f32`."""
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides (in elements) of a tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides place the elements of a tensor alike. Those of dimensions of size 1 mean nothing."""
    if one == other or 0 in shape:
        return True
    return all(size == 1 or have == want for size, have, want in zip(shape, one, other, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype, strides (in elements) and device type of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor."""
        stride = tuple(int(s) for s in tensor.stride()) if tensor.layout == torch.strided else ()
        return cls(tuple(int(s) for s in tensor.shape), tensor.dtype, stride, str(tensor.device))

    @classmethod
    def flat(cls, numel: int, like: TensorSpec) -> TensorSpec:
        """A one-dimensional contiguous tensor with dtype and device of `like`."""
        return cls((numel,), like.dtype, (1,), like.device)

    def with_shape(self, shape: Iterable[int]) -> TensorSpec:
        """The contiguous tensor of another shape."""
        shape = tuple(shape)
        return TensorSpec(shape, self.dtype, contiguous_stride(shape), self.device)

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """The same with another dtype."""
        return TensorSpec(self.shape, dtype, self.stride, self.device)

    def empty(self, device: str | torch.device | None = None) -> torch.Tensor:
        """A tensor like this with any values, on its own device or another one; on "meta" it has no memory."""
        where = self.device if device is None else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=where)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the order of the dimensions, without gaps."""
        return same_layout(self.shape, self.stride, contiguous_stride(self.shape))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one gap-free block of memory without overlap, in any order of dimensions."""
        if 0 in self.shape:
            return True
        expected = 1
        for stride, size in sorted(
            (stride, size) for size, stride in zip(self.shape, self.stride, strict=True) if size != 1
        ):
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def may_overlap(self) -> bool:
        """Whether several elements may lie in one place. Strides that interlock without that count, too."""
        reach = 0  # how far the dimensions of smaller strides reach
        for stride, size in sorted((stride, size) for size, stride in zip(self.shape, self.stride, strict=True)):
            if size > 1 and stride <= reach:
                return 0 not in self.shape
            reach += stride * (size - 1)
        return False

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"
        if not self.is_contiguous:
            text += f"({','.join(map(str, self.stride))})"
        return text


Spec = TensorSpec | tuple["Spec", ...] | None


def empty_of(spec: Spec, number: Any = None, device: str | None = None) -> Any:
    """A tensor with any values for each one of the spec, and `number` for what is none."""
    if isinstance(spec, tuple):
        return tuple(empty_of(item, number, device) for item in spec)
    return number if spec is None else spec.empty(device)


def spec_of(value: Any) -> Spec:
    """The spec of a traced value: a tensor, a sequence of them, or None for anything else."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(item) for item in value)
    return None


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """What one collective does. `group` names mesh axes, never ranks, so that it is the same on every rank."""

    kind: str
    group: str
    dtype: torch.dtype
    nbytes: int
    members: tuple[str, ...]
    sequence: int
    reduce_op: str | None = None
    fusion_id: int | None = None
    role: str = "user"
    """ "gradient", "rows" (numbers of rows), "norm", "buffer", "redistribution", "parameter", or "user"."""


@dataclass(frozen=True)
class Part:
    """One member of a fused collective: what it reduces for whom, before and after."""

    names: tuple[str, ...]
    value: fx.Node
    result: fx.Node


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, end) of a flat tensor."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"[{self.begin}:{self.end}]"


@dataclass(slots=True)
class NodeInfo:
    """The metadata of one node.

    phase: "input", "forward", "backward" or "update".
    spec: shape, dtype and strides of what it gives; a tuple for several results, None for none.
    module: the path of the module that it comes from.
    name: its canonical name.
    collective: of a start, what the collective does.
    sends: stretches of buckets (given by their start) that go onto the wire once this node has run.
    rest: on such a start, the stretches that it still has to send.
    kept: whether its memory stays allocated between steps.
    once: whether it is computed once and for all, as it depends on nothing but shapes and constants.
    next_step: this node runs in the following step, just before that node.
    region: the number of the region with which Inductor compiles it; None: it runs as an op of its own.
    rounded: whether the region rounds each number of half precision as the ops by themselves do.
    source: the user's line, `file:line`.
    origin: the name under which a profile knows the node.
    share: which part of the origin's work it does.
    declared: whether a pass has written the spec, which must then be that of what the op makes.
    parts: the members of a fused start.
    serves: the parameters whose gradient a redistribution sums.
    varies: the group of mesh axes along which ranks may hold different values. "": all ranks hold the same;
        None: nobody knows.
    writes: which node fills which stretch of its flat storage.
    gives_way: whether the backend's threads are let onto the core before it.

    Fields from `source` on are scratch: texts and comparisons leave them out.
    """

    phase: str
    spec: Spec = None
    module: str = ""
    name: str = ""
    collective: CollectiveInfo | None = None
    sends: tuple[tuple[fx.Node, Stretch], ...] = ()
    rest: tuple[Stretch, ...] = ()
    kept: bool = False
    once: bool = False
    next_step: fx.Node | None = None
    region: int | None = None
    rounded: bool = False
    source: str = field(default="", compare=False)
    origin: str = field(default="", compare=False)
    share: float = field(default=1.0, compare=False)
    declared: bool = field(default=False, compare=False)
    parts: tuple[Part, ...] = field(default=(), compare=False)
    serves: tuple[str, ...] = field(default=(), compare=False)
    varies: str | None = field(default=None, compare=False)
    writes: tuple[tuple[fx.Node, Stretch], ...] = field(default=(), compare=False)
    gives_way: bool = field(default=False, compare=False)

    def copy(self, same: Mapping[fx.Node, fx.Node]) -> NodeInfo:
        """The same for another graph, in which `same[node]` stands for each node."""
        made = NodeInfo(*_fields_of(self))
        if self.sends:
            made.sends = tuple((same[start], stretch) for start, stretch in self.sends)
        if self.next_step is not None:
            made.next_step = same[self.next_step]
        if self.parts:
            made.parts = tuple(Part(p.names, same[p.value], same[p.result]) for p in self.parts if _all_in(same, p))
        if self.writes:
            made.writes = tuple((same[node], stretch) for node, stretch in self.writes if node in same)
        return made

    def derive(self, spec: Spec, **changes: Any) -> NodeInfo:
        """The metadata of a node that a pass makes beside this one: same place in the program, another value."""
        made = NodeInfo(self.phase, spec, self.module, source=self.source)
        for key, value in changes.items():
            setattr(made, key, value)
        return made


_fields_of = attrgetter(*(each.name for each in fields(NodeInfo)))  # several times as fast as `replace`


def _all_in(same: Mapping[fx.Node, fx.Node], part: Part) -> bool:
    return part.value in same and part.result in same


def info(node: fx.Node) -> NodeInfo:
    """The typed metadata of a node. Raises KeyError when a pass forgot to set it."""
    found: NodeInfo = node.meta[_KEY]
    return found


def has_info(node: fx.Node) -> bool:
    return _KEY in node.meta


def set_info(node: fx.Node, value: NodeInfo) -> fx.Node:
    node.meta[_KEY] = value
    return node


def forget_others(graph: fx.Graph) -> None:
    """Let go of all that nodes know beside their typed metadata."""
    for node in graph.nodes:
        node.meta = {_KEY: node.meta[_KEY]}


def tensor_spec(node: fx.Node) -> TensorSpec:
    """The spec of a node that yields one tensor. Raises TypeError otherwise."""
    spec = info(node).spec
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"node {node.name} yields {spec}, not one tensor")
    return spec
