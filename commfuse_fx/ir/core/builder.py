"""Insert nodes with complete metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import WAIT
from commfuse_fx.ir.core.meta import NodeInfo, Spec, TensorSpec, info, set_info, tensor_spec
from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.ir.core.reshaped import dense_like, reshaped

aten = torch.ops.aten


class Builder:
    """A builder makes nodes of one program. Each new node takes the place and module of `like`, and a unique name."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        spec: Spec,
        like: NodeInfo,
        name: str,
        **fields: Any,
    ) -> fx.Node:
        """Make a call at the graph's current insertion point (see `after` and `before`).

        target: the op.
        args, kwargs: its arguments.
        spec: shape, dtype and strides of what the op makes. They have to be true.
        like: metadata of the node that this one belongs to.
        name: a name, which is made unique.
        fields: other fields of the new NodeInfo.
        """
        # fx looks through all that it is given along with the op for symbolic numbers, of which there are none here.
        node = self.graph.call_function(target)
        node.args = tuple(args)
        if kwargs:
            node.kwargs = dict(kwargs)
        return set_info(node, like.derive(spec, name=self.program.names.reserve(name), declared=True, **fields))

    def after(self, node: fx.Node) -> Any:
        """Inside a `with` block, new nodes stand behind this one."""
        return self.graph.inserting_after(node)

    def before(self, node: fx.Node) -> Any:
        """Inside a `with` block, new nodes stand in front of this one."""
        return self.graph.inserting_before(node)

    def placeholder(self, kind: str, name: str, spec: Spec, owner: int = -1) -> fx.Node:
        """Make a new input of the step, placed after the existing ones."""
        with self.after(self.program.last_input):
            node = self.graph.placeholder(f"{kind}_{len(self.program.sources)}")
        text = f"update.{owner}.{name}" if owner >= 0 else name
        set_info(node, NodeInfo("input", spec, name=self.program.names.reserve(text)))
        self.program.add_source(node, Source(kind, name, owner))
        return node

    def wait(self, start: fx.Node, name: str) -> fx.Node:
        """Make the wait of a start node."""
        details = info(start)
        return self.call(WAIT, (start,), spec=details.spec, like=details, name=name)

    def cast(self, value: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
        """Make a copy of a value in another dtype."""
        spec = dense_like(tensor_spec(value)).with_dtype(dtype)
        return self.call(aten._to_copy.default, (value,), {"dtype": dtype}, spec=spec, like=info(value), name=name)

    def zeros(self, spec: TensorSpec, like: NodeInfo, name: str) -> fx.Node:
        """Make a tensor of zeros, which lies as the spec says."""
        args = (list(spec.shape), list(spec.stride))
        kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
        memory = self.call(aten.empty_strided.default, args, kwargs, spec=spec, like=like, name=f"{name}/memory")
        return self.call(aten.zero_.default, (memory,), spec=spec, like=like, name=name)

    def reshape(self, value: fx.Node, shape: Sequence[int], name: str) -> fx.Node:
        """Make `value` in another shape: a view where its strides allow it, else a copy."""
        spec = tensor_spec(value)
        target = aten.view.default if spec.is_contiguous else aten.reshape.default
        made = reshaped(spec, tuple(shape))
        return self.call(target, (value, list(shape)), spec=made, like=info(value), name=name)

    def padded(self, value: fx.Node, rows: int, like: NodeInfo, name: str) -> fx.Node:
        """Make a copy of `value` with so many rows of zeros behind its own."""
        spec = tensor_spec(value)
        sizes = [0] * (2 * len(spec.shape) - 1) + [rows]
        larger = spec.with_shape((spec.shape[0] + rows, *spec.shape[1:]))
        return self.call(aten.constant_pad_nd.default, (value, sizes), spec=larger, like=like, name=name)

    def strided(self, base: fx.Node, spec: TensorSpec, offset: int, name: str, **fields: Any) -> fx.Node:
        """Make the part of a flat tensor that starts at `offset` elements, with this shape and these strides."""
        args = (base, list(spec.shape), list(spec.stride), offset)
        return self.call(aten.as_strided.default, args, spec=spec, like=info(base), name=name, **fields)
