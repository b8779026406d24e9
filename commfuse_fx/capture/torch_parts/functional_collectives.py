"""Turn torch's functional collectives in a model into collectives of the graph, with the gradients of torch's own.

The tracer sees them below autograd, with the name of a process group. Only the group of all ranks is supported, which
is the group of all mesh axes.

Why: docs/decisions.md, "Groups are names of mesh axes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ops import NO_FUSION_ID, REDUCE_OPS

_WORLD = "0"  # the name of the default group, also where there is none


def functional_collectives(mesh: Mesh, divided: bool) -> dict[Any, Callable[..., Any]]:
    """Decompositions of torch.ops._c10d_functional for a graph on this mesh, by op.

    divided: whether the compiler divides the graph. The model is then written for one device, and must not communicate.

    The decompositions raise CaptureError for a group that is not the whole mesh, and for calls that the graph cannot
    express.
    """
    if not dist.is_available():
        return {}
    made = _Collectives(mesh, divided)
    by_name: dict[str, Callable[..., Any]] = {
        "wait_tensor": lambda x: x,
        **dict.fromkeys(("isend", "irecv", "batch_p2p_ops"), _refuse_messages),
        "all_reduce": made.all_reduce,
        "all_reduce_": _into_first(made.all_reduce),
        "all_reduce_coalesced": _each(made.all_reduce),
        "all_reduce_coalesced_": _into_each(made.all_reduce),
        "all_gather_into_tensor": made.all_gather,
        "all_gather_into_tensor_out": _into_out(made.all_gather),
        "all_gather_into_tensor_coalesced": _each(made.all_gather),
        "reduce_scatter_tensor": made.reduce_scatter,
        "reduce_scatter_tensor_out": _into_out(made.reduce_scatter),
        "reduce_scatter_tensor_coalesced": _each(made.reduce_scatter),
        "all_to_all_single": made.all_to_all,
        "broadcast": made.broadcast,
        "broadcast_": _into_first(made.broadcast),
    }
    packets = {name: getattr(torch.ops._c10d_functional, name, None) for name in by_name}  # versions of torch differ
    return {packet.default: by_name[name] for name, packet in packets.items() if packet is not None}


class _Collectives:
    """Collectives over all axes of a mesh, with the arguments of torch's functional collectives."""

    def __init__(self, mesh: Mesh, divided: bool) -> None:
        self._mesh = mesh
        self._divided = divided
        self._ops = torch.ops.commfuse

    def all_reduce(self, x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        made: torch.Tensor = self._ops.all_reduce(x, self._op("all_reduce", op), *self._on(group, "all_reduce"))
        return made

    def all_gather(self, x: torch.Tensor, size: int, group: Any) -> torch.Tensor:
        made: torch.Tensor = self._ops.all_gather(x if x.ndim else x[None], *self._on(group, "all_gather"))
        return made

    def reduce_scatter(self, x: torch.Tensor, op: str, size: int, group: Any) -> torch.Tensor:
        where = self._on(group, "reduce_scatter")
        made: torch.Tensor = self._ops.reduce_scatter(x, self._op("reduce_scatter", op), *where)
        return made

    def all_to_all(
        self, x: torch.Tensor, sizes_out: Sequence[int] | None, sizes_in: Sequence[int] | None, group: Any
    ) -> torch.Tensor:
        where = self._on(group, "all_to_all")
        world = self._mesh.world
        if any(sizes is not None and len(set(sizes)) > 1 for sizes in (sizes_out, sizes_in)) or x.shape[0] % world:
            raise CaptureError(
                f"all_to_all_single sends parts of different sizes ({sizes_in} of {x.shape[0]} rows): in a compiled "
                "step all parts have one size, so pad them, and use cf.ops.all_to_all"
            )
        made: torch.Tensor = self._ops.all_to_all(x, *where)
        return made

    def broadcast(self, x: torch.Tensor, src: int, group: Any) -> torch.Tensor:
        made: torch.Tensor = self._ops.broadcast(x, src, *self._on(group, "broadcast"))
        return made

    def _op(self, kind: str, op: str) -> str:
        if op not in REDUCE_OPS:
            raise CaptureError(f"{kind} with the reduce op {op!r} cannot be compiled: use {', '.join(REDUCE_OPS)}")
        return op

    def _on(self, group: Any, kind: str) -> tuple[int, str, int]:
        """The size, the axes and the fusion id of a collective over this process group. Raises CaptureError."""
        if self._divided:
            raise CaptureError(
                f'the model calls torch\'s functional {kind}, but a divided step (parallel_mode="semi_auto" or "auto") '
                "is written for one device, and the compiler puts in the collectives: remove the call, or use "
                'parallel_mode="data_parallel"'
            )
        mesh = self._mesh
        everyone = mesh.devices or tuple(range(mesh.world))
        ranks = _ranks_of(group, everyone)
        if ranks != everyone:
            raise CaptureError(
                f"{kind} over {_described(group, ranks)}: a compiled step takes torch's functional collectives over "
                f"all {mesh.world} rank(s) of its mesh ({mesh}), in their order; for a part of them use "
                f'cf.ops.{kind}(x, group="axis of the mesh")'
            )
        return mesh.world, mesh.all_axes, NO_FUSION_ID


def _ranks_of(group: Any, everyone: tuple[int, ...]) -> tuple[int, ...] | None:
    """The ranks of a process group, or None if no group has that name."""
    name: Any = group if isinstance(group, str) else group.group_name
    if not dist.is_initialized():
        return everyone if name == _WORLD else None
    try:
        found = torch._C._distributed_c10d._resolve_process_group(name)
    except RuntimeError:
        return None
    return tuple(dist.get_process_group_ranks(found))


def _described(group: Any, ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return f"group {group!r}, which does not exist in this process"
    return f"the group of rank(s) {', '.join(map(str, ranks))}"


def _refuse_messages(*args: Any) -> Any:
    raise CaptureError(
        "messages from one rank to another cannot be part of a compiled step: send and receive outside of the "
        "model's forward, or use cf.ops.all_to_all"
    )


def _into_first(collective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, *rest: x.copy_(collective(x, *rest))


def _into_out(collective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, out: out.copy_(collective(*args))


def _each(collective: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda tensors, *rest: [collective(x, *rest) for x in tensors]


def _into_each(collective: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda tensors, *rest: [x.copy_(collective(x, *rest)) for x in tensors]
