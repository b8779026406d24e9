"""Keep the strides of every value when a trace is made functional.

Autograd has seen the strides of the first trace, and has left out copies that were not needed. An in-place op keeps the
strides of its tensor, but the functional op in its place (`masked_fill`, say) may return others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from commfuse_fx.ir.core.dependence import written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, same_layout, spec_of
from commfuse_fx.ir.core.random_draws import draws_random_numbers


def in_place_ops_that_move(graph: fx.Graph) -> dict[fx.Node, Callable[..., torch.Tensor]]:
    """The in-place ops of a traced graph whose functional form returns other strides, with that form."""
    found: dict[fx.Node, Callable[..., torch.Tensor]] = {}
    for node in graph.nodes:
        written = written_nodes(node)
        if len(written) != 1 or node.args[0] is not written[0]:
            continue
        if torch.Tag.inplace_view in node.target.tags or draws_random_numbers(node):
            continue
        spec = spec_of(written[0].meta.get("val"))
        if not isinstance(spec, TensorSpec) or spec.is_contiguous or not spec.is_dense:
            continue  # a part of a tensor is put back into its place in the whole
        functional = _functional_form(node.target)
        if functional is not None and not _lies_as(_result(functional, node), spec):
            found[node] = functional
    return found


def laid_out_like(value: Any, before: Any) -> Any:
    """`value` itself if it has the strides of `before`, else a copy that has them."""
    if isinstance(value, (tuple, list)) and isinstance(before, (tuple, list)):
        return type(value)(map(laid_out_like, value, before)) if len(value) == len(before) else value
    spec = spec_of(before)
    if not isinstance(value, torch.Tensor) or not isinstance(spec, TensorSpec) or _lies_as(value, spec):
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)


def _lies_as(value: torch.Tensor, spec: TensorSpec) -> bool:
    return value.layout != torch.strided or same_layout(spec.shape, value.stride(), spec.stride)


def _functional_form(target: Any) -> Callable[..., torch.Tensor] | None:
    """The overload of the op without the underscore that takes the same arguments."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return next((each for each in overloads if _parameters(each) == _parameters(target)), None)


def _parameters(target: Any) -> list[tuple[str, str, Any]]:
    return [(argument.name, str(argument.type), argument.default_value) for argument in target._schema.arguments]


def _result(functional: Callable[..., torch.Tensor], node: fx.Node) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
    written = args[0]
    assert isinstance(written, FakeTensor), "the trace is of tensors without data"
    with written.fake_mode, torch.no_grad():
        return functional(*args, **kwargs)
