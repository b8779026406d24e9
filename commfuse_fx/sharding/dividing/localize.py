"""Find the specs of the local results of ops, by running the ops on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.ir.known_shapes import known_shapes
from commfuse_fx.ir.meta import Spec, empty_of, info, spec_of, tensor_spec
from commfuse_fx.ir.redistribution import COLLECTIVES, meta_shape, sum_partial

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class LocalSpecs:
    """Finds and caches the specs of calls. `of(target, args, kwargs)` takes nodes for tensors; equal calls run once."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[Any, Spec]] = {}

    def of(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Spec]:
        """The target to use, and the spec of its result. A node whose spec is None stands for a number.

        The target changes only for a view that the strides of the parts do not allow: it becomes a reshape.
        """
        try:
            key = (target, _key(args), _key(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:
            return self._run(target, args, kwargs)
        if known is None:
            known = self._known[key] = self._run(target, args, kwargs)
        return known

    def _run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Spec]:
        if target in COLLECTIVES:
            given = tensor_spec(args[0])
            ways = 1 if target is sum_partial else args[2]
            return target, given.with_shape(meta_shape(target, given.shape, ways, tuple(args[2:])))
        with known_shapes(), self._mode, torch.no_grad():
            taken = fx.node.map_arg(tuple(args), lambda node: empty_of(info(node).spec, 0))
            named = fx.node.map_arg(dict(kwargs), lambda node: empty_of(info(node).spec, 0))
            try:
                return target, spec_of(target(*taken, **named))
            except (RuntimeError, ValueError):
                if target not in _VIEWS:
                    raise
                return aten.reshape.default, spec_of(aten.reshape.default(*taken, **named))


def _key(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return (fx.Node, info(value).spec)
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    return (type(value), value)  # 1, 1.0 and True are equal, but not the same argument
