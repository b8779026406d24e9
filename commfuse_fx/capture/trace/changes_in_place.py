"""Refuse changes in place that tracing would get wrong, where torch does not refuse them itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from commfuse_fx.capture.trace.provenance import origin_of
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.dependence import Roots, is_view, written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, spec_of

aten = torch.ops.aten


def refuse_changes(graph: fx.Graph) -> None:
    """Raises CaptureError for a change of a traced graph that has no right functional form. It names the source line.

    Eager execution refuses to change a tensor in place into one of another shape, but fake tensors accept it. A change
    through a view is put back into its base, which has no place for it if elements of the view share memory: a right
    form would need the order of the writes. Torch's rule for `unfold` also clears what the view leaves out.
    """
    for node in graph.nodes:
        for value in written_nodes(node):
            wrong = _by_another_op(node) or _other_shape(node, value) or _no_way_back(value)
            if wrong:
                raise CaptureError(f"{origin_of(node).place}: {node.target} {wrong}")


def refuse_turned(turned: Mapping[fx.Node, bool]) -> None:
    """Raises CaptureError for a tensor that was turned in place beside views, where its gradient comes out wrong.

    turned: as in `OriginRecorder`. The trace may have ended early.
    """
    for node, is_part in turned.items():
        if _changes_with_others(node, is_part):
            raise CaptureError(
                f"{origin_of(node).place}: {node.target} turns a tensor in place that shares memory with a view, "
                "and one of both is changed or used later with a gradient that would be wrong: call the op without the "
                "underscore"
            )


def _by_another_op(node: fx.Node) -> str:
    target: Any = node.target
    if not target._schema.is_mutable or target.namespace == "aten":
        return ""
    return (
        "changes an argument in place, which is followed for torch's own ops only: let it return what is new, and copy "
        "that into the argument"
    )


def _other_shape(node: fx.Node, value: fx.Node) -> str:
    target: Any = node.target
    made, given = node.meta.get("val"), value.meta.get("val")
    if not target._schema.name.endswith("_") or torch.Tag.inplace_view in target.tags:
        return ""
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or made.shape == given.shape:
        return ""
    return (
        f"changes a tensor of shape {tuple(given.shape)} in place, but its result has shape {tuple(made.shape)}: call "
        "the op without the underscore"
    )


def _no_way_back(value: fx.Node) -> str:
    """What is wrong with the views between the memory and this value of it; "" if nothing is."""
    while is_view(value) or written_nodes(value):
        base: Any = value.args[0] if is_view(value) else written_nodes(value)[0]
        made, given = value.meta.get("val"), base.meta.get("val")
        leaves_out = value.target is aten.unfold.default and value.meta["val"].numel() != base.meta["val"].numel()
        if leaves_out or (_may_overlap(made) and not _may_overlap(given)):
            return (
                f"changes memory through a view of {value.target}, which sees some elements several times or not at "
                "all: change the tensor itself, a slice of it, or a clone() of the view"
            )
        value = base
    return ""


def _may_overlap(value: Any) -> bool:
    spec = spec_of(value)
    return isinstance(spec, TensorSpec) and spec.may_overlap


def _changes_with_others(turned: fx.Node, is_part: bool) -> bool:
    """Whether autograd makes the history of a view anew that no longer fits the shapes.

    It does so after each change of the memory. For fake tensors it calls the op that made the view, which knows nothing
    of what has been done in place since; for others it uses their strides.

    is_part: whether the turned tensor is a view itself. If not, views that were made of it before no longer fit.
    """
    nodes, roots = list(turned.graph.nodes), Roots(turned.graph)
    place = {node: i for i, node in enumerate(nodes)}
    if is_part:
        later = nodes[place[turned] + 1 :]
        return any(roots[value] is roots[turned] for node in later for value in written_nodes(node))
    return any(
        roots[node] is roots[turned] and any(place[user] > place[turned] for user in node.users)
        for node in nodes[: place[turned]]
        if is_view(node) and node.target is not aten.detach.default
    )
