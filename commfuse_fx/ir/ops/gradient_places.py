"""Gradients that are computed where they are sent from: each in its place in the memory of its bucket."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.ops.out_variants import WRITES_INTO

ALIGNMENT = 64
"""Members start on cache-line boundaries, as tensors of their own do: kernels run at full speed, and give the same
bits but for the last few elements of a tensor that does not fill whole vectors. Kernels of the CPU compute those one by
one, and round them otherwise than in the middle of a flat tensor: `runtime.execute.whole_vectors` hands such tensors to
them by themselves."""


def allocate(build: Builder, spec: TensorSpec, before: fx.Node, like: NodeInfo, name: str, kept: bool) -> fx.Node:
    """Flat memory for a bucket, made in front of a node. kept: whether it stays between steps."""
    kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
    with build.before(before):
        return build.call(aten.empty.memory_format, ([spec.numel],), kwargs, spec=spec, like=like, name=name, kept=kept)


def writes_into(source: fx.Node, spec: TensorSpec) -> bool:
    """Whether the op that computes a gradient can do so in a place of this layout."""
    computed = tensor_spec(source)
    fits = computed.dtype == spec.dtype and computed.is_contiguous and spec.is_contiguous
    return source.target in WRITES_INTO and len(source.users) == 1 and fits


def source_of(value: fx.Node, spec: TensorSpec) -> fx.Node:
    """What to write into a place of this layout: the gradient before casts, copies and reshapes that serve only the
    bucket."""
    while len(value.users) == 1:
        inner = value.args[0] if value.args else None
        if not isinstance(inner, fx.Node) or inner.op != "call_function":
            break
        # Before a reshape the elements stand in row-major order: its place must have the same one.
        is_reshape = (
            value.target in (aten.view.default, aten._unsafe_view.default)
            and tensor_spec(inner).is_contiguous
            and spec.is_contiguous
        )
        if not is_reshape and value.target not in (aten._to_copy.default, aten.clone.default):
            break
        if _rounds(inner, value, spec):
            break
        if len(inner.users) != 1:
            # Others use it too: it can still be copied from.
            return inner
        value = inner
    return value


def write(
    build: Builder, source: fx.Node, storage: fx.Node, spec: TensorSpec, offset: int, name: Callable[[str], str]
) -> fx.Node:
    """Compute a gradient straight into its place, or copy it there.

    spec: the layout of the place. name: gives the names of the nodes, of the place and of what writes there.
    """
    computed = tensor_spec(source)
    if writes_into(source, spec):
        target = WRITES_INTO[source.target]
        with build.before(source):
            place = build.strided(storage, computed, offset, name("place"))
            kwargs = {**source.kwargs, "out": place}
            origin = info(source).origin or info(source).name
            return build.call(
                target, source.args, kwargs, spec=computed, like=info(source), name=name("write"), origin=origin
            )
    place_spec = spec if computed.shape == spec.shape else spec.with_shape(computed.shape)
    with build.after(source):
        place = build.strided(storage, place_spec, offset, name("place"))
    info(place).phase = info(source).phase
    with build.after(place):
        return build.call(aten.copy_.default, (place, source), spec=place_spec, like=info(source), name=name("write"))


def _rounds(inner: fx.Node, value: fx.Node, spec: TensorSpec) -> bool:
    """Whether a cast takes digits away that the bucket's dtype would keep."""
    wide, narrow = tensor_spec(inner).dtype, tensor_spec(value).dtype
    return narrow != spec.dtype and torch.promote_types(wide, narrow) != narrow
