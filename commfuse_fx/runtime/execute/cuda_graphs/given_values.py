"""What a captured step takes for fixed: where its tensors lie, and what the numbers of its optimizer are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_fx.ir.core.program import Program, Source


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
        self._tensors = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._lists = [place for place, value in enumerate(values) if isinstance(value, (list, tuple))]
        others = dict.fromkeys((*self._tensors, *self._lists))
        self._places = [place for place in range(len(values)) if place not in others]
        """Where numbers are."""
        self._numbers = [values[place] for place in self._places]
        self._addresses = self._addresses_of(values)

    def change(self, values: Sequence[Any]) -> Change | None:
        """How other values of the same placeholders differ from these; None if they do not."""
        numbers = [values[place] for place in self._places]
        if torch.Tensor not in map(type, numbers) and numbers == self._numbers:
            addresses = self._addresses_of(values)
            return None if addresses == self._addresses else self._moved(values, addresses)
        sources = list(self._program.sources.values())
        for place in self._places:
            if isinstance(values[place], torch.Tensor):
                text = f"{self._named(sources[place])} varies, and is read from memory from now on"
                return Change(text, is_number=False)
        number = next(at for at, (now, before) in enumerate(zip(numbers, self._numbers, strict=True)) if now != before)
        named = self._named(sources[self._places[number]])
        return Change(f"{named} is {numbers[number]} in place of {self._numbers[number]}", is_number=True)

    def _addresses_of(self, values: Sequence[Any]) -> list[int]:
        tensors = [values[place] for place in self._tensors]
        for place in self._lists:
            tensors += values[place]
        return list(map(torch.Tensor.data_ptr, tensors))

    def _moved(self, values: Sequence[Any], addresses: Sequence[int]) -> Change:
        """The change for tensors that lie at other addresses than before."""
        places = [*self._tensors, *(place for place in self._lists for _ in values[place])]
        moved = next(place for place, now, old in zip(places, addresses, self._addresses, strict=True) if now != old)
        return Change(_tensor_text(list(self._program.sources.values())[moved]), is_number=False)

    def _named(self, source: Source) -> str:
        return f"{source.name} of the optimizer's param group {self._program.updates[source.owner].group}"


def _tensor_text(source: Source) -> str:
    if source.kind in ("parameter", "buffer"):
        return f"{source.kind} {source.name} lies elsewhere in memory"
    if source.kind == "flat":
        return f"parameters lie elsewhere in memory, from {source.name} on"
    if source.kind == "gradient":
        return f"{source.name} of earlier micro-batches lies elsewhere in memory"
    return f"the optimizer's {source.name} lies elsewhere in memory"
