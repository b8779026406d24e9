"""The pool of flat tensors that hold the parameters and optimizer states of a step.

Why: docs/decisions.md, "Parameters of a bucket move into flat storage".
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.program import Segment
from commfuse_fx.runtime.memory.lent_memory import LentMemory
from commfuse_fx.runtime.memory.own_storage import with_own_storage

log = logging.getLogger("commfuse_fx.runtime")


def part_of_flat(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """The part of `flat` at `offset` (elements) with shape and strides of `like`, in a storage of its own."""
    return with_own_storage(flat.as_strided(like.shape, like.stride(), flat.storage_offset() + offset))


class MemoryHolder(Protocol):
    """A memory holder keeps parts of flat memory between steps."""

    def forget(self) -> None:
        """Let go of them, and ask for others at the next step."""


class FlatPool:
    """A flat pool holds the flat tensors of a step. All its programs share them, so a new input shape moves nothing."""

    def __init__(self) -> None:
        self._flats: dict[tuple[str, Segment], torch.Tensor] = {}
        self._memory: dict[tuple[str, TensorSpec], torch.Tensor] = {}
        self._lent: dict[tuple[str, TensorSpec], LentMemory] = {}
        self._warned: list[str] = []
        self.holders: weakref.WeakSet[MemoryHolder] = weakref.WeakSet()
        """Who keeps parts of its memory between steps."""
        self.lost = 0
        """How often memory was dropped because collectives may still write to it."""

    def memory(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """Memory for a gradient, the same in every step: the system is slow to hand out large blocks."""
        key = (name, spec)
        if key not in self._memory:
            self._memory[key] = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        return self._memory[key]

    def lend(self, name: str, spec: TensorSpec) -> LentMemory:
        """Memory for gradients that the user gets: that of the step before, if he has dropped them."""
        key = (name, spec)
        if key not in self._lent or not self._lent[key].is_free():
            self._lent[key] = LentMemory(spec)
        return self._lent[key]

    @contextmanager
    def lending_anew(self) -> Iterator[None]:
        """Inside of the block `lend` gives memory that it does not give again afterwards."""
        before, self._lent = self._lent, {}
        try:
            yield
        finally:
            self._lent = before

    def held(self) -> list[torch.Tensor]:
        """All memory that `memory` has given. Who keeps it may go on writing to it when the pool has dropped it."""
        return list(self._memory.values())

    def keep_memory(self, wanted: Iterable[tuple[str, TensorSpec]]) -> None:
        """Drop all gradient memory but this, given by the arguments of `memory`."""
        keys = dict.fromkeys(wanted)
        self._memory = {key: tensor for key, tensor in self._memory.items() if key in keys}
        self._lent = {key: lent for key, lent in self._lent.items() if key in keys}

    def let_go(self) -> None:
        """Give back the memory of gradients, and that where parameters and states no longer lie. No step is pending."""
        self.keep_memory(())
        for each in self.holders:
            each.forget()

    def forget_memory(self) -> None:
        """Drop the gradients' memory: after a step has failed, collectives may still write to it."""
        self._memory.clear()
        self._lent.clear()
        self.lost += 1

    def find(
        self,
        what: str,
        segment: Segment,
        parts: Sequence[torch.Tensor | None],
        like: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """The flat tensor that holds exactly these parts at the offsets of `segment`, or None.

        what: "parameter", or the name of a state. like: tensors whose strides and dtypes the parts must have.
        """
        flat = self._flats.get((what, segment))
        if flat is None:
            return None
        start, size = flat.data_ptr(), flat.element_size()
        for part, other, (_, offset) in zip(parts, like or parts, segment.members, strict=True):
            if part is None or other is None or (part.stride(), part.dtype) != (other.stride(), other.dtype):
                return None
            if part.dtype != flat.dtype or part.data_ptr() != start + offset * size:
                return None
        return flat

    def warn_of_shared_memory(self, name: str) -> None:
        """Warn that a parameter leaves memory that it shares with other processes."""
        self._warn(
            "parameter %s lies in memory shared with other processes, and the step moves it out of there: the "
            "other processes keep its present values. Send them copies after a step, such as param.detach().clone()",
            name,
        )

    def warn_of_aliases(self, name: str) -> None:
        """Warn that a parameter leaves memory that other tensors use too."""
        self._warn(
            "the step moves parameter %s into flat storage, but another tensor looks at its memory (a view of it, "
            "param.data, an entry of an earlier state_dict) and keeps the present values. Make such tensors anew after "
            "the first step. If two modules share a parameter, give both the same nn.Parameter",
            name,
        )

    def _warn(self, text: str, name: str) -> None:
        """Log each text once, for the first parameter that it concerns."""
        if text not in self._warned:
            self._warned.append(text)
            log.warning(text, name)

    def add(self, what: str, segment: Segment, flat: torch.Tensor) -> torch.Tensor:
        """Keep a new flat tensor, and drop the flat tensors that held any of its members before."""
        taken = dict.fromkeys(name for name, _ in segment.members)
        for key in [key for key in self._flats if key[0] == what and any(name in taken for name, _ in key[1].members)]:
            del self._flats[key]
        self._flats[what, segment] = flat
        return flat
