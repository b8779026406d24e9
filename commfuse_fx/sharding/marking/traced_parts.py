"""Let marked calls compute with a rank's own part of the batch while a step is traced (`cross_batch=True`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.sharding.marking.part_ops import PartCall

_ops = torch.ops.commfuse


@dataclass
class BatchParts:
    """The batch of a traced step. rows: of the whole batch. parts: among how many ranks it is divided.

    inside: the marked call that is running.
    """

    rows: int = 0
    parts: int = 1
    inside: PartCall | None = None

    @property
    def can_enter(self) -> bool:
        """Whether there are several parts, and no marked call is running around this one."""
        return self.parts > 1 and self.inside is None


@dataclass
class EnteredCall:
    """One marked call between its first op and its last.

    heights: the sizes of dimension 0 that tensors with the batch have in it.
    """

    batch: BatchParts
    call: PartCall
    heights: dict[int, None] = field(default_factory=dict)

    def enter(self, arguments: Any) -> Any:
        """The same arguments, with the rank's own rows of the tensors that have the batch as dimension 0."""
        entered: Any = pytree.tree_map_only(torch.Tensor, self._own, arguments)
        if not self.heights:
            raise ConfigValueError(
                f"{self.call.label} gets no tensor whose dimension 0 is the batch of {self.batch.rows} rows: mark a "
                "call that does, or leave cross_batch out"
            )
        self.batch.inside = self.call
        return entered

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter, of which every rank has the same."""
        found: torch.Tensor = _ops.own_whole(tensor, self.batch.parts, str(self.call))
        return found

    def leave(self, results: Any) -> Any:
        """The same results, put together from those of the parts."""
        self.batch.inside = None
        return pytree.tree_map_only(torch.Tensor, self._put_together, results)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, parts = self.batch.rows, self.batch.parts
        if isinstance(tensor, nn.Parameter) or not tensor.ndim or tensor.shape[0] % rows:
            return self.whole(tensor)
        if tensor.shape[0] % parts:
            raise ConfigValueError(
                f"{self.call.label} gets a tensor of {tensor.shape[0]} rows, which do not divide by the {parts} ranks "
                "among which the batch is divided: pad or cut the batch"
            )
        self.heights[tensor.shape[0] // parts] = None
        found: torch.Tensor = _ops.own_rows(tensor, parts, str(self.call))
        return found

    def _put_together(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        if tensor.ndim and tensor.shape[0] in self.heights:
            found = _ops.rows_of_parts(tensor, self.batch.parts, str(self.call))
            return found
        if tensor.ndim or not tensor.is_floating_point():
            raise ConfigValueError(
                f"{self.call.label} returns a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, which has no "
                "row per sample and is no loss, so that each rank has another one: mark the function or module that "
                "uses it, up to where there are rows or a loss"
            )
        found = _ops.mean_of_parts(tensor, self.batch.parts, str(self.call))
        return found


@dataclass
class PartHooks:
    """Hooks around the calls of one module, which get the rank's own rows. Calls may nest, as with checkpointing."""

    path: str
    place: str
    batch: BatchParts
    numbers: Iterator[int]
    open: list[tuple[EnteredCall, list[tuple[nn.Module, str, nn.Parameter]]] | None] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.batch.can_enter:
            self.open.append(None)
            return None
        reduces = all(each.training for each in module.modules())
        entered = EnteredCall(self.batch, PartCall(next(self.numbers), self.path, self.place, reduces))
        given = entered.enter((args, kwargs))
        known: dict[int, torch.Tensor] = {}
        slots = [
            (each, name, param)
            for each in module.modules()
            for name, param in each._parameters.items()
            if param is not None
        ]
        for each, name, param in slots:
            if id(param) not in known:
                known[id(param)] = entered.whole(param)
            own: Any = known[id(param)]
            each._parameters[name] = own  # setattr refuses a tensor that is computed
        self.open.append((entered, slots))
        return given

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        held = self.open.pop()
        if held is None:
            return output
        entered, slots = held
        for each, name, param in slots:
            each._parameters[name] = param
        return entered.leave(output)
