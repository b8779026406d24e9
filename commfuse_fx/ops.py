"""Collectives for use inside a model: differentiable, traced into the graph, fused by their `fusion` id.

Outside `compile` they run at once over the default process group (and do nothing on one device), so
the same model also runs eagerly. Gradients are those of the sum of all ranks' losses: the gradient of
an all_reduce is an all_reduce, of an all_gather a reduce_scatter, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from commfuse_fx.config.compile_config import Default
from commfuse_fx.config.fusion_marks import check_fusion_id
from commfuse_fx.errors import ConfigTypeError, ConfigValueError, NotAvailableError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.support.renamed import all_gather_single, reduce_scatter_single

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
NO_FUSION_ID = -1

_library = torch.library.Library("commfuse", "DEF")
_library.define("all_reduce(Tensor x, str op, int group_size, str group, int fusion) -> Tensor")
_library.define("all_gather(Tensor x, int group_size, str group, int fusion) -> Tensor")
_library.define("reduce_scatter(Tensor x, str op, int group_size, str group, int fusion) -> Tensor")
_library.define("broadcast(Tensor x, int src, int group_size, str group, int fusion) -> Tensor")
_library.define("all_to_all(Tensor x, int group_size, str group, int fusion) -> Tensor")
_library.define("zero_unless_source(Tensor x, int src, str group) -> Tensor")

_ops = torch.ops.commfuse
COLLECTIVES = (_ops.all_reduce, _ops.all_gather, _ops.reduce_scatter, _ops.broadcast, _ops.all_to_all)
"""The collectives that users write."""

_mesh: ContextVar[Mesh | None] = ContextVar("commfuse_mesh", default=None)


@contextmanager
def tracing_on(mesh: Mesh) -> Iterator[None]:
    """While a step is traced, groups are axes of this mesh."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


_only_read: ContextVar[bool] = ContextVar("commfuse_only_read", default=False)


@contextmanager
def nothing_sent() -> Iterator[None]:
    """While the code of a model runs although it is only to be read, collectives that would send raise."""
    token = _only_read.set(True)
    try:
        yield
    finally:
        _only_read.reset(token)


def all_reduce(x: torch.Tensor, op: str = "sum", group: str | None = None, fusion: Any = Default(0)) -> torch.Tensor:
    """Reduce `x` (any shape) elementwise over a group; every rank gets the result.

    op: "sum", "avg", "max", "min" or "product"; only "sum" and "avg" have gradients.
    group: mesh axis names joined by commas. None: all ranks.
    fusion: n > 0 joins all collectives of that id that can be joined; 0: never fused. None, or not given: as
        the `comm_fusion` mode of this kind says.

    Raises ConfigValueError on an unknown op or axis, ConfigTypeError on a fusion id that is not an int.
    """
    size, name = _group(group)
    out: torch.Tensor = torch.ops.commfuse.all_reduce(x, _check_op(op), size, name, _fusion(fusion))
    return out


def all_gather(x: torch.Tensor, dim: int = 0, group: str | None = None, fusion: Any = Default(0)) -> torch.Tensor:
    """Concatenate the ranks' `x` along `dim`: size d becomes group_size * d. All ranks give the same shape.

    dim: the dimension.
    group, fusion: as for `all_reduce`.

    Raises like `all_reduce`.
    """
    size, name = _group(group)
    moved = x.movedim(dim, 0).contiguous() if dim else x
    out: torch.Tensor = torch.ops.commfuse.all_gather(moved, size, name, _fusion(fusion))
    return out.movedim(0, dim) if dim else out


def reduce_scatter(
    x: torch.Tensor, op: str = "sum", dim: int = 0, group: str | None = None, fusion: Any = Default(0)
) -> torch.Tensor:
    """Reduce `x` over a group and keep this rank's slice of `dim`: size d becomes ceil(d / group_size).

    When d does not divide, the end is padded with zeros; the last ranks' slices hold the padding.

    op, group, fusion: as for `all_reduce`.
    dim: the dimension.

    Raises like `all_reduce`.
    """
    size, name = _group(group)
    moved = x.movedim(dim, 0).contiguous() if dim else x
    out: torch.Tensor = torch.ops.commfuse.reduce_scatter(moved, _check_op(op), size, name, _fusion(fusion))
    return out.movedim(0, dim) if dim else out


def broadcast(x: torch.Tensor, src: int = 0, group: str | None = None, fusion: Any = Default(0)) -> torch.Tensor:
    """Give every rank the `x` of one member of the group.

    src: that member's position in the group.
    group, fusion: as for `all_reduce`.

    Raises like `all_reduce`.
    """
    size, name = _group(group)
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < size:
        raise ConfigValueError(f"broadcast src={src!r} is not a member of the group: give an int in 0..{size - 1}")
    out: torch.Tensor = torch.ops.commfuse.broadcast(x, src, size, name, _fusion(fusion))
    return out


def all_to_all(x: torch.Tensor, dim: int = 0, group: str | None = None, fusion: Any = Default(0)) -> torch.Tensor:
    """Send slice i of `dim` to rank i, and concatenate what arrives in rank order; the shape stays the same.

    dim: the dimension.
    group, fusion: as for `all_reduce`.

    Raises ConfigValueError when `dim` does not divide by the group size.
    """
    size, name = _group(group)
    if x.shape[dim] % size:
        raise ConfigValueError(
            f"all_to_all: dimension {dim} of shape {tuple(x.shape)} does not divide by the group size {size}; pad it"
        )
    moved = x.movedim(dim, 0).contiguous() if dim else x
    out: torch.Tensor = torch.ops.commfuse.all_to_all(moved, size, name, _fusion(fusion))
    return out.movedim(0, dim) if dim else out


def _group(group: str | None) -> tuple[int, str]:
    mesh = _mesh.get()
    if group is not None and not isinstance(group, str):
        raise ConfigTypeError(f"group={group!r} must be mesh axis names such as 'dp' or 'dp,tp', or None for all ranks")
    if mesh is None:
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return size, group or ""
    if group is None:
        return mesh.world, mesh.all_axes
    unknown = [name for name in group.split(",") if not mesh.parts_of(name)]
    if unknown:
        raise ConfigValueError(f"group={group!r}: no mesh axis {unknown[0]!r}; axes are {', '.join(mesh.names)}")
    axes = ",".join(axis for name in group.split(",") for axis in mesh.parts_of(name))
    return mesh.size(axes), axes


def _check_op(op: str) -> str:
    if op not in REDUCE_OPS:
        raise ConfigValueError(f"op={op!r} is not a reduce op: use one of {', '.join(REDUCE_OPS)}")
    return op


def _fusion(fusion: Any) -> int:
    if fusion is None or isinstance(fusion, Default):
        return NO_FUSION_ID
    return check_fusion_id(fusion, "fusion")


# Shapes, for tracing.


@torch.library.register_fake("commfuse::all_reduce", lib=_library)
def _(x: torch.Tensor, op: str, group_size: int, group: str, fusion: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("commfuse::all_gather", lib=_library)
def _(x: torch.Tensor, group_size: int, group: str, fusion: int) -> torch.Tensor:
    return x.new_empty((x.shape[0] * group_size, *x.shape[1:]))


@torch.library.register_fake("commfuse::reduce_scatter", lib=_library)
def _(x: torch.Tensor, op: str, group_size: int, group: str, fusion: int) -> torch.Tensor:
    return x.new_empty((-(-x.shape[0] // group_size), *x.shape[1:]))


@torch.library.register_fake("commfuse::broadcast", lib=_library)
def _(x: torch.Tensor, src: int, group_size: int, group: str, fusion: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("commfuse::all_to_all", lib=_library)
def _(x: torch.Tensor, group_size: int, group: str, fusion: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("commfuse::zero_unless_source", lib=_library)
def _(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    return torch.empty_like(x)


# Eager execution, outside `compile`, over the default process group.


def _eager(name: str) -> Any:
    return torch.library.impl(_library, name, "CompositeExplicitAutograd")


def _check_eager(name: str, group: str) -> None:
    if _only_read.get():
        refuse_to_send(f"cf.ops.{name}")
    if group:
        raise ConfigValueError(f"group={group!r}: mesh axes exist only inside commfuse_fx.compile; use group=None here")


def refuse_to_send(name: str) -> NoReturn:
    """Raises NotAvailableError."""
    raise NotAvailableError(
        f'lower() is not available with capture="dynamo" for a model that calls {name}: what comes after it follows '
        "from values of other ranks; call the module once under torchrun, and read its attribute graphs"
    )


def _reduce_op(op: str) -> Any:
    return getattr(dist.ReduceOp, "SUM" if op == "avg" else op.upper())


@_eager("all_reduce")
def _(x: torch.Tensor, op: str, group_size: int, group: str, fusion: int) -> torch.Tensor:
    _check_eager("all_reduce", group)
    out = x.clone(memory_format=torch.contiguous_format)
    if group_size > 1:
        dist.all_reduce(out, _reduce_op(op))
    return out.div_(group_size) if op == "avg" else out


@_eager("all_gather")
def _(x: torch.Tensor, group_size: int, group: str, fusion: int) -> torch.Tensor:
    _check_eager("all_gather", group)
    if group_size == 1:
        return x.clone()
    out = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
    all_gather_single(out, x.contiguous())
    return out


@_eager("reduce_scatter")
def _(x: torch.Tensor, op: str, group_size: int, group: str, fusion: int) -> torch.Tensor:
    _check_eager("reduce_scatter", group)
    if group_size == 1:
        return x.clone()
    rows = -(-x.shape[0] // group_size)
    padded = x.new_zeros((rows * group_size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    out = x.new_empty((rows, *x.shape[1:]))
    reduce_scatter_single(out, padded, _reduce_op(op))
    return out.div_(group_size) if op == "avg" else out


@_eager("broadcast")
def _(x: torch.Tensor, src: int, group_size: int, group: str, fusion: int) -> torch.Tensor:
    _check_eager("broadcast", group)
    out = x.clone(memory_format=torch.contiguous_format)
    if group_size > 1:
        dist.broadcast(out, src)
    return out


@_eager("all_to_all")
def _(x: torch.Tensor, group_size: int, group: str, fusion: int) -> torch.Tensor:
    _check_eager("all_to_all", group)
    if group_size == 1:
        return x.clone()
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous())
    return out


@_eager("zero_unless_source")
def _(x: torch.Tensor, src: int, group: str) -> torch.Tensor:
    _check_eager("zero_unless_source", group)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return x.clone() if rank == src else torch.zeros_like(x)


# Gradients.


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep every argument of the call but the tensor, and the tensor's first size."""
    ctx.kept = inputs[1:]
    ctx.rows = inputs[0].shape[0] if inputs[0].ndim else 1


def _linear_only(op: str) -> str:
    if op not in ("sum", "avg"):
        raise ConfigValueError(f'op={op!r} has no gradient: use "sum" or "avg", or call it under torch.no_grad()')
    return op


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> Any:
    op, size, group, fusion = ctx.kept
    return torch.ops.commfuse.all_reduce(grad, _linear_only(op), size, group, fusion), None, None, None, None


def _all_gather_backward(ctx: Any, grad: torch.Tensor) -> Any:
    size, group, fusion = ctx.kept
    return torch.ops.commfuse.reduce_scatter(grad, "sum", size, group, fusion), None, None, None


def _reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> Any:
    op, size, group, fusion = ctx.kept
    gathered = torch.ops.commfuse.all_gather(grad, size, group, fusion)
    if gathered.shape[0] != ctx.rows:
        gathered = gathered.narrow(0, 0, ctx.rows)
    if _linear_only(op) == "avg":
        gathered = gathered / size
    return gathered, None, None, None, None


def _broadcast_backward(ctx: Any, grad: torch.Tensor) -> Any:
    src, size, group, fusion = ctx.kept
    total = torch.ops.commfuse.all_reduce(grad, "sum", size, group, fusion)
    return torch.ops.commfuse.zero_unless_source(total, src, group), None, None, None, None


def _all_to_all_backward(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.commfuse.all_to_all(grad, *ctx.kept), None, None, None


for _name, _backward in (
    ("all_reduce", _all_reduce_backward),
    ("all_gather", _all_gather_backward),
    ("reduce_scatter", _reduce_scatter_backward),
    ("broadcast", _broadcast_backward),
    ("all_to_all", _all_to_all_backward),
):
    torch.library.register_autograd(f"commfuse::{_name}", _backward, setup_context=_setup_context, lib=_library)
