"""Trace ops on tensors without elements by running their kernels, if torch's rules for fake tensors fail.

Such a rule may divide by the number of elements, or raise another error than eager execution does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from commfuse_fx.capture.trace.known_results import key_of, known_result, remember
from commfuse_fx.errors import CommFuseError

_MEANT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException, CommFuseError)


class FakeTensors(FakeTensorMode):
    """A FakeTensorMode that runs the op itself if torch's rule for it fails and some tensor has no elements."""

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Any = None) -> object:
        key = key_of(self, func, args, kwargs)
        known = None if key is None else known_result(self, key, args)
        if known is not None:
            return known
        self.cache_enabled = key is None  # torch need not remember it too
        try:
            made = super().dispatch(func, types, args, kwargs)
            if key is not None:
                remember(self, key, func, args, kwargs, made)
            return made
        except _MEANT:
            raise
        except Exception:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
            if not any(tensor.numel() == 0 for tensor in given) or _returns_arguments(func):
                raise
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> object:
        """Raises what the op raises in eager execution."""
        with no_dispatch():
            args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
            made = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, self.from_tensor, made)


def _returns_arguments(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or schema.is_mutable or any(each.alias_info for each in schema.returns)


def _zeros(tensor: FakeTensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.fake_device).zero_()
