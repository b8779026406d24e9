"""Find the specs of the local results of ops, by running the ops on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.ir.core.meta import Spec, empty_of, info, spec_of, tensor_spec
from commfuse_fx.ir.ops.known_shapes import known_shapes
from commfuse_fx.ir.ops.redistribution import COLLECTIVES, meta_shape, sum_partial

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


_MOST = 50_000
"""How many specs a process remembers. It is far more than a step needs, and then all are forgotten."""

_remembered: dict[Any, tuple[Any, Spec]] = {}
"""Specs of calls of torch's own ops, which later compiles of this process look up."""


class LocalSpecs:
    """Finds and caches the specs of calls. `of(target, args, kwargs)` takes nodes for tensors; equal calls run once.

    Ops that others have registered may come to make something else: their calls are known to one compile alone.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[Any, Spec]] = {}
        # The first two say what a tensor is that an op makes of numbers, the others choose layouts of convolutions.
        self._settings = (
            torch.get_default_dtype(), torch._C._get_default_device(), torch._C._get_mkldnn_enabled(),
            torch._C._get_cudnn_enabled(), torch.get_num_threads(),
        )  # fmt: skip

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
            known = self._known[key] = self._of_process(key, target, args, kwargs)
        return known

    def _of_process(self, key: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Spec]:
        """As `of`, for a call that this compile does not know."""
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return self._run(target, args, kwargs)
        key = (self._settings, key)
        if (known := _remembered.get(key)) is None:
            known = self._run(target, args, kwargs)
            if len(_remembered) >= _MOST:
                _remembered.clear()
            _remembered[key] = known
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
