"""Make a trace functional. Torch's functionalization runs the nodes that it may change, and all others are copied."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._C._functorch import maybe_current_level
from torch._functorch.eager_transforms import _maybe_unwrap_functional_tensor, _wrap_all_tensors_to_functional
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from commfuse_fx.capture.torch_parts.batch_norm import statistics_of
from commfuse_fx.capture.trace.provenance import ORIGIN, annotate_after, origin_of, traced_graph
from commfuse_fx.capture.trace.same_layout import in_place_ops_that_move, laid_out_like
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.dependence import Roots, is_view, written_nodes
from commfuse_fx.ir.core.random_draws import draws_random_numbers

_CHAIN = "mutation on a view chain"  # a part of torch's message


def make_functional(
    traced: fx.GraphModule, inputs: list[torch.Tensor], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """The trace without ops that write into tensors, other than copies into its inputs at the end.

    inputs: fake tensors for the placeholders. decompositions: by op, what is to stand in its place.
    New nodes inherit the origins of old ones, and results keep their strides.
    """
    if not any(node.target in decompositions or written_nodes(node) for node in traced.graph.nodes):
        return traced
    run = _Functional(traced, decompositions).run
    return make_fx(
        functionalize(lambda *args: run(*args), remove="mutations"),
        decomposition_table=decompositions,
        _disable_torch_fn_metadata_mode=True,
    )(*inputs)


def _nodes_to_run(graph: fx.Graph, decompositions: Mapping[Any, Any]) -> dict[fx.Node, None]:
    """The nodes that functionalization may change: those that write, read what some node writes, or are decomposed, and
    those that read views that are decomposed, of which a copy may lie in another way."""
    roots = Roots(graph)
    written = {roots[value]: None for node in graph.nodes for value in (*written_nodes(node), *statistics_of(node))}
    found: dict[fx.Node, None] = {}
    copied: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if is_view(node) and (node.target in decompositions or any(value in copied for value in node.all_input_nodes)):
            copied[node] = None
        if node.target is operator.getitem:
            is_concerned = node.args[0] in found
        elif isinstance(node.target, torch._ops.OpOverload):
            inputs = node.all_input_nodes
            is_concerned = (
                node.target in decompositions
                or bool(written_nodes(node))
                or any(roots[value] in written or value in copied for value in inputs)
            )
        else:
            is_concerned = True
        if is_concerned:
            found[node] = None
    return found


def _lists_with_shared_memory(graph: fx.Graph) -> dict[fx.Node, None]:
    """The ops that change a list of tensors of which some lie in the same memory, such as one tensor twice."""
    changing = {node: written for node in graph.nodes if len(written := written_nodes(node)) > 1}
    lists = {node: written for node, written in changing.items() if str(node.target).startswith("aten._foreach_")}
    if not lists:
        return {}
    roots = Roots(graph)
    return {node: None for node, written in lists.items() if len({roots[each] for each in written}) < len(written)}


def _keeps_its_size(node: fx.Node) -> bool:
    """Whether a node resizes a tensor to the shape that it has. Functionalization makes it contiguous all the same."""
    if node.target is not torch.ops.aten.resize_.default or node.kwargs:
        return False
    written, size = node.args
    assert isinstance(written, fx.Node)
    return list(written.meta["val"].shape) == size


class _Copied:
    """The value of a node that was copied. tensor: what stands for it where a node is run, once one has asked."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.tensor: torch.Tensor | None = None


class _Functional(fx.Interpreter):
    """Traces a graph again."""

    def __init__(self, module: fx.GraphModule, decompositions: Mapping[Any, Any]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors name the user's line
        self._moving = in_place_ops_that_move(module.graph)
        self._to_run = _nodes_to_run(module.graph, decompositions)
        self._sharing = _lists_with_shared_memory(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._to_run:
            return self._copy(n)
        graph = traced_graph()
        last = graph._root.prev
        if draws_random_numbers(n):
            out = self._draw_in_memory_order(n)
        elif n in self._moving:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            out = args[0].copy_(self._moving[n](*args, **kwargs))
        elif n in self._sharing:
            self._one_by_one(n)
            out = None
        elif _keeps_its_size(n):
            out = self.fetch_args_kwargs_from_env(n)[0][0]
        else:
            out = self._run_op(n)
            if not any(part.alias_info for part in getattr(getattr(n.target, "_schema", None), "returns", ())):
                out = laid_out_like(out, n.meta.get("val"))
        annotate_after(graph, last, origin_of(n))
        return out

    def _run_op(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except RuntimeError as error:
            if _CHAIN not in str(error):
                raise
            raise CaptureError(
                f"{origin_of(n).place}: {n.target} changes memory through a view by as_strided of another view: "
                "call as_strided on the tensor that owns the memory, with a storage_offset, or change a clone()"
            ) from error

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return fx.node.map_arg(args, lambda value: self._tensor_of(self.env[value]))

    def _copy(self, n: fx.Node) -> _Copied:
        name = getattr(getattr(n.target, "overloadpacket", None), "__name__", None)
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._node_of)
        node = traced_graph().create_node("call_function", n.target, name=name)
        node._update_args_kwargs(args, kwargs)
        node.meta |= {key: n.meta[key] for key in ("val", ORIGIN) if key in n.meta}
        return _Copied(node)

    def _node_of(self, n: fx.Node) -> fx.Node:
        """The node of the new graph that has the value of an old one."""
        value = self.env[n]
        if isinstance(value, _Copied):
            return value.node
        mode = get_proxy_mode()
        assert mode is not None, "not tracing"
        slot = get_proxy_slot(_maybe_unwrap_functional_tensor(value, reapply_views=True), mode.tracer, None)
        if slot is not None:
            node: fx.Node = slot.proxy.node
            return node
        constant = mode.tracer.create_arg(value)
        assert isinstance(constant, fx.Node) and constant.op == "get_attr"
        constant.meta["val"] = n.meta["val"]  # that of torch would belong to the functionalization that runs
        return constant

    def _tensor_of(self, value: Any) -> Any:
        """The tensor that stands for a copied value while functionalization runs."""
        if not isinstance(value, _Copied):
            return value
        if value.tensor is None:
            mode, level, fake = get_proxy_mode(), maybe_current_level(), value.node.meta["val"]
            assert mode is not None and level is not None and isinstance(fake, FakeTensor)
            set_proxy_slot(fake, mode.tracer, _ProxyTensor(fx.Proxy(value.node, mode.tracer), None))
            value.tensor = _wrap_all_tensors_to_functional(fake, level)
        return value.tensor

    def _one_by_one(self, n: fx.Node) -> None:
        """Change the tensors of a list one after the other, as eager execution does."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        op, count = n.target, len(args[0])
        assert isinstance(op, torch._ops.OpOverload)
        for i in range(count):
            op(*(each[i : i + 1] if isinstance(each, (list, tuple)) else each for each in args), **kwargs)

    def _draw_in_memory_order(self, n: fx.Node) -> Any:
        """Eager in-place draws fill a permuted tensor in the order of its memory; functional ones do not."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        op: Any = n.target
        if not op._schema.is_mutable or args[0].is_contiguous():
            return super().run_node(n)
        order = sorted(range(args[0].ndim), key=lambda dim: -args[0].stride(dim))
        op(args[0].permute(order), *args[1:], **kwargs)
        return args[0]
