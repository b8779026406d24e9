"""Record plain ops of a trace in a shorter way than torch does: its own takes three quarters of the time of an op.

An op is plain if its arguments are Python constants and fake tensors that the trace knows, and nothing decomposes it.
Torch records all others. The nodes are the same, except that they lack metadata that only torch's compilers read.
"""

from __future__ import annotations

import inspect
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.capture.trace.known_results import CONSTANTS_OF_OPS

_aten = torch.ops.aten

_NOT_PLAIN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_NEVER_PLAIN = frozenset(
    [
        _aten.lift_fresh.default,
        _aten.is_nonzero.default,
        _aten.size.default,
        _aten.stride.default,
        _aten.storage_offset.default,
    ]
)

_PARAMETERS = ["proxy_mode", "func", "pre_dispatch", "args", "kwargs"]
_original: Any = getattr(proxy_tensor, "proxy_call", None)


class _NotPlain(Exception):
    """An argument is not plain."""


def quick_recording() -> AbstractContextManager[None]:
    """Inside the `with` block, make_fx records plain ops in the short way, if this version of torch can be followed."""
    if _original is None or list(inspect.signature(_original).parameters) != _PARAMETERS:
        return nullcontext()
    if "decomposition_table" not in inspect.signature(proxy_tensor.ProxyTorchDispatchMode).parameters:
        return nullcontext()  # torch 2.11 keeps it elsewhere
    return patched_here(proxy_tensor, "proxy_call", _record)


def _record(mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, decompositions = _name_if_plain(func), getattr(mode, "decomposition_table", None)
    if not name or pre_dispatch or decompositions is None or func in decompositions:
        return _original(mode, func, pre_dispatch, args, kwargs)
    tracer = mode.tracer
    known = tracer.tensor_tracker
    try:
        node_args = tuple([_node_of(value, known) for value in args])
        node_kwargs = {key: _node_of(value, known) for key, value in kwargs.items()}
    except _NotPlain:
        return _original(mode, func, pre_dispatch, args, kwargs)
    # fx looks for symbolic numbers in what it is given along with the op.
    node = tracer.graph.create_node("call_function", func, name=name)
    node._update_args_kwargs(node_args, node_kwargs)
    out = func(*args, **kwargs)
    if _is_strided(out):
        _stands_for(node, out, tracer)
    elif type(out) in (tuple, list) and all(each is None or _is_strided(each) for each in out):
        for i, each in enumerate(out):
            part = tracer.graph.create_node("call_function", operator.getitem, name="getitem")
            part._update_args_kwargs((node, i), {})
            if each is not None:
                _stands_for(part, each, tracer)
        parts = list(node.users)
        node.meta["val"] = type(out)([part.meta.get("val") for part in parts])
    else:
        proxy_tensor.track_tensor_tree(out, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return out


def _is_strided(value: Any) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided


def _stands_for(node: fx.Node, value: FakeTensor, tracer: Any) -> None:
    node.meta["val"] = proxy_tensor.snapshot_fake(value)
    proxy_tensor.set_proxy_slot(value, tracer, proxy_tensor._ProxyTensor(fx.Proxy(node, tracer), None))


def _node_of(value: Any, known: Any) -> Any:
    """What stands for an argument in the graph. Raises _NotPlain."""
    kind = type(value)
    if kind in CONSTANTS_OF_OPS:
        return value
    if kind is FakeTensor:
        slot = known.get(value)
        if slot is None or slot.constant is not None:
            raise _NotPlain
        return slot.proxy.node
    if kind is list or kind is tuple:
        return kind([_node_of(item, known) for item in value])
    raise _NotPlain


_names: dict[int, tuple[Any, str]] = {}
"""By the identity of an op, which stays alive here: the name of its nodes, or an empty text if it is not plain."""


def _name_if_plain(func: Any) -> str:
    found = _names.get(id(func))
    if found is None:
        name = fx.Graph()._target_to_str(func.overloadpacket.__name__) if _is_plain(func) else ""
        found = _names[id(func)] = (func, name)
    return found[1]


def _is_plain(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in _NEVER_PLAIN:
        return False
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    if implicit in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit):
        return False
    return not any(tag in func.tags for tag in _NOT_PLAIN_TAGS)
