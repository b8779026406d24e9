"""What a compiled region returns gets the memory and the strides that the graph has recorded.

Why: docs/decisions.md, "Inductor compiles what lies between collectives, and the plan stays the authority".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.ops.regions import Region
from commfuse_fx.runtime.execute.code.recorded import as_recorded

RegionCode = Callable[[list[Any]], Sequence[Any]]
"""Takes the list of a region's inputs, which it empties, and returns its outputs."""


class RecordedOutputs:
    """The code of a region, whose outputs are copied where the graph expects memory of their own or other strides.

    A compiler returns one tensor for two results that are equal. What runs after the region may write to one of them,
    such as a reduction in place. As this does not depend on values, the first call shows which outputs it concerns.
    """

    def __init__(self, code: RegionCode, region: Region, roots: Roots) -> None:
        self._code = code
        self._outputs = region.outputs
        self._specs = [tensor_spec(node) for node in region.outputs]
        self._roots = [roots[node] for node in region.outputs]
        self._given = [roots[node] for node in region.inputs]
        self._copied: list[int] | None = None

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        if self._copied is None:
            return self._first(given)
        found = self._code(given)
        return self._recorded(found, self._copied) if self._copied else found

    def _first(self, given: list[Any]) -> Sequence[Any]:
        owner = {_memory(value): root for value, root in zip(given, self._given, strict=True)}
        kept = list(given)  # so that no output gets memory of an input that has been dropped
        found = self._code(given)
        for i, (value, spec) in enumerate(zip(found, self._specs, strict=True)):
            if (value.dtype, value.shape) != (spec.dtype, spec.shape):
                name = info(self._outputs[i]).name
                raise VerificationError(
                    f"compiled code returns {value.dtype}{list(value.shape)} for node {name}, which is "
                    f"{spec.dtype}{list(spec.shape)} in the graph; please report this, and use "
                    'backend="eager" until then'
                )
        copied = [
            i for i, value in enumerate(found) if owner.setdefault(_memory(value), self._roots[i]) is not self._roots[i]
        ]
        copied += [
            i
            for i, (value, spec) in enumerate(zip(found, self._specs, strict=True))
            if as_recorded(value, spec) is not value
        ]
        del kept
        self._copied = list(dict.fromkeys(copied))
        return self._recorded(found, self._copied)

    def _recorded(self, found: Sequence[Any], copied: Sequence[int]) -> Sequence[Any]:
        values = list(found)
        for i in copied:
            spec = self._specs[i]
            values[i] = spec.empty(values[i].device).copy_(values[i])
        return values


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.numel() else id(value)
