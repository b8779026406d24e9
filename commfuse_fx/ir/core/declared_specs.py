"""What passes say of their nodes is what these make: the strides above all.

A pass writes down the spec of every node that it adds (`NodeInfo.declared`), and others rely on it: a kernel that is
told of contiguous memory reads it in its order. Here each such op is run on tensors without data that lie as the graph
says of its operands.

Why: docs/decisions.md, "What a graph says of strides is made true when it runs".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import is_start, is_wait, result_of_start
from commfuse_fx.ir.core.meta import Spec, TensorSpec, empty_of, has_info, info, same_layout, spec_of
from commfuse_fx.ir.core.program import Program


def check_declared_specs(program: Program, fail: Callable[[fx.Node, str], None]) -> None:
    """Call `fail` for every node whose op makes something else than the pass that added the node has declared."""
    for node in program.graph.nodes:
        if not is_declared(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if (wrong := difference(info(node).spec, computed_spec(node))) is not None:
            fail(node, wrong)


def computed_spec(node: fx.Node) -> Spec:
    """The spec of what the op of a node makes of operands that lie as the graph says. The op is one of torch's."""
    args = tuple(map(_key, node.args))
    kwargs = tuple((name, _key(value)) for name, value in node.kwargs.items())
    return _made(node.target, args, kwargs, is_start(node), is_wait(node))


def declare_anew(nodes: Iterable[fx.Node]) -> None:
    """Declare what these nodes make of their operands, which lie otherwise now, and what others make of that."""
    pending = dict.fromkeys(nodes)
    while pending:
        node = min(pending)
        del pending[node]
        if not is_declared(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        details = info(node)
        made = _on_devices_of(details.spec, computed_spec(node))
        if difference(details.spec, made) is not None:
            details.spec = made
            pending.update(dict.fromkeys(node.users))


def _on_devices_of(declared: Spec, made: Spec) -> Spec:
    if isinstance(declared, TensorSpec) and isinstance(made, TensorSpec):
        return replace(made, device=declared.device)
    if isinstance(declared, tuple) and isinstance(made, tuple) and len(declared) == len(made):
        return tuple(map(_on_devices_of, declared, made))
    return declared


def is_declared(node: fx.Node) -> bool:
    """Whether a pass has written the spec of this node's result."""
    return node.op == "call_function" and has_info(node) and info(node).declared and info(node).spec is not None


def difference(declared: Spec, made: Spec) -> str | None:
    """How what a node makes differs from what is declared of it; None where it does not. Devices are not looked at."""
    if isinstance(declared, TensorSpec) and isinstance(made, TensorSpec):
        same = declared.shape == made.shape and declared.dtype == made.dtype
        if same and same_layout(made.shape, declared.stride, made.stride):
            return None
        return f"is recorded as {_text(declared)}, but makes {_text(made)}"
    if isinstance(declared, tuple) and isinstance(made, tuple) and len(declared) == len(made):
        return next((found for pair in zip(declared, made, strict=True) if (found := difference(*pair))), None)
    # Of several results, some may be left out by the pass that knows that nobody needs them.
    return None if declared is None or declared == made else f"is recorded as {declared}, but makes {made}"


def _text(spec: TensorSpec) -> str:
    return f"{spec} of strides {spec.stride}"


@lru_cache(maxsize=1 << 14)
def _made(target: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...], starts: bool, waits: bool) -> Spec:
    given = [_value(arg) for arg in args]
    named = {name: _value(value) for name, value in kwargs}
    if waits:
        return spec_of(given[0])
    with torch.no_grad():
        return spec_of(result_of_start(target, given) if starts else target(*given, **named))


def _key(value: Any) -> Any:
    """What of an argument decides the result's spec, hashable: nodes are their specs."""
    if isinstance(value, fx.Node):
        return (fx.Node, info(value).spec)
    if isinstance(value, (list, tuple)):
        return (list, tuple(map(_key, value)))
    return (type(value), value)  # 1, 1.0 and True are equal, but not the same argument


def _value(key: Any) -> Any:
    kind, value = key
    if kind is fx.Node:
        return empty_of(value, 1, "meta")  # None stands for a number
    if kind is list:
        return [_value(item) for item in value]
    return torch.device("meta") if kind is torch.device else value
