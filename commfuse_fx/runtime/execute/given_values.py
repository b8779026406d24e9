"""What a captured step takes for fixed: where its tensors lie, and what the numbers of its optimizer are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_fx.ir.program import Program, Source


@dataclass(frozen=True)
class Change:
    """A change is a difference between what was given when a step was captured and what is given now.

    text: the difference in words. is_number: whether a hyper-parameter of the optimizer differs.
    """

    text: str
    is_number: bool


class GivenValues:
    """The values of a program's placeholders at some time: the addresses of tensors, and numbers."""

    def __init__(self, program: Program, values: Sequence[Any]) -> None:
        self._program = program
        self._numbers, self._addresses = _seen(values)

    def change(self, values: Sequence[Any]) -> Change | None:
        """How other values of the same placeholders differ from these; None if they do not."""
        numbers, addresses = _seen(values)
        if numbers == self._numbers and addresses == self._addresses:
            return None
        at = 0
        for place, (source, value) in enumerate(zip(self._program.sources.values(), values, strict=True)):
            if place in numbers:
                if numbers[place] != self._numbers.get(place):
                    return Change(self._number_text(source, self._numbers.get(place), value), is_number=True)
                continue
            if place in self._numbers:
                return Change(f"{self._named(source)} varies, and is read from memory from now on", is_number=False)
            end = at + (1 if isinstance(value, torch.Tensor) else len(value))
            if addresses[at:end] != self._addresses[at:end]:
                return Change(_tensor_text(source), is_number=False)
            at = end
        raise AssertionError("some value differs")

    def _number_text(self, source: Source, before: Any, now: Any) -> str:
        return f"{self._named(source)} is {now} in place of {before}"

    def _named(self, source: Source) -> str:
        return f"{source.name} of the optimizer's param group {self._program.updates[source.owner].group}"


def _seen(values: Sequence[Any]) -> tuple[dict[int, Any], list[int]]:
    """Numbers by their place, and the addresses of all tensors."""
    numbers: dict[int, Any] = {}
    tensors: list[torch.Tensor] = []
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(value)
        else:
            numbers[place] = value
    return numbers, list(map(torch.Tensor.data_ptr, tensors))


def _tensor_text(source: Source) -> str:
    if source.kind in ("parameter", "buffer"):
        return f"{source.kind} {source.name} lies elsewhere in memory"
    if source.kind == "flat":
        return f"parameters lie elsewhere in memory, from {source.name} on"
    return f"the optimizer's {source.name} lies elsewhere in memory"
