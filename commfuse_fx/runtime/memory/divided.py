"""A divided parameter: the step works on this rank's parts, and the user sees whole tensors.

Why: docs/decisions.md, "A divided module hands out whole tensors without memory".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import Owned, S
from commfuse_fx.ir.core.program import Parameter
from commfuse_fx.ir.rows.shard_rows import padding_of, rows_per_rank, spec_of_rows
from commfuse_fx.runtime.memory.layout import Layout, dividing, holders, joined_group, part_of, whole_of
from commfuse_fx.runtime.memory.own_storage import has_aliases
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.runtime.ranks.exchange import Exchange


@dataclass(frozen=True)
class HeldPart:
    """A tensor of which this rank holds a part.

    key: a name that is the same on all ranks. group: the mesh axes over which it is divided. holders: the ranks of this
    rank's group that hold parts. part: what this rank holds. whole: the user's tensor.
    """

    key: str
    group: str
    holders: tuple[int, ...]
    part: torch.Tensor
    whole: torch.Tensor
    layout: Layout


class DividedParameter:
    """A parameter of which this rank keeps a part, or of whose optimizer states it does.

    whole: the user's parameter.
    part: what the graph reads of it: this rank's part, or the user's parameter if only its update is divided. It may be
        given: that of another one that divides the parameter itself, where this one divides its states alone.
    updates: whether what is updated is bound here. Else gradients alone may be divided.
    updated: what this rank updates of the part: the part itself, or some rows of it.
    rows: the shape of what a rank updates, which is that of its part of the gradient.
    state: the optimizer states of what is updated, by name.
    shown: the whole tensors that the user's optimizer has for states of the parameter's shape. Other states, such as a
        step count, are the same objects in both.
    changes: how often others have seen the part to have new values.
    """

    def __init__(
        self,
        param: Parameter,
        whole: nn.Parameter,
        mesh: Mesh,
        rank: int,
        part: nn.Parameter | None = None,
        updates: bool = True,
    ) -> None:
        self.name = param.name
        self.whole = whole
        self.state_layout: Layout = dividing(param.layout, mesh)
        self.layout: Layout = self.state_layout if part is None else ()
        self.mesh = mesh
        self.rank = rank
        self.is_divided = bool(self.layout)
        if part is None:
            part = nn.Parameter(param.spec.empty(whole.device), requires_grad=False) if self.is_divided else whole
        self.part = part
        self.changes = 0
        self._gathered = (-1, 0)
        if param.shard:
            self.state_layout += ((param.shard, S(0) if param.owner is None else Owned(param.owner)),)
        self.rows = spec_of_rows(param, mesh).shape
        self._begin, self._rows = _rows_of(param, mesh, rank) if param.shard and updates else (0, 0)
        self._is_padded = bool(param.shard) and padding_of(param, mesh) > 0
        self.updated = self._new_rows() if param.shard and updates else self.part
        self.state: dict[str, Any] = {}
        self.shown: dict[str, torch.Tensor] = {}

    @cached_property
    def place(self) -> Place:
        """Where the part lies in the whole parameter."""
        return Place.of_layout(self.whole.shape, self.layout, self.mesh, self.rank)

    @cached_property
    def state_place(self) -> Place:
        """Where the part of a state lies in the whole one."""
        return Place.of_layout(self.whole.shape, self.state_layout, self.mesh, self.rank)

    def _new_rows(self) -> nn.Parameter:
        if self._is_padded:  # the graph makes a copy; this one says how the states lie
            return nn.Parameter(self.part.detach().new_empty((self._rows, *self.part.shape[1:])), requires_grad=False)
        return nn.Parameter(self._rows_of_part(), requires_grad=False)

    def _rows_of_part(self) -> torch.Tensor:
        return self.part.detach().narrow(0, self._begin, self._rows)

    def follow(self) -> None:
        """Let the rows that are updated lie in the parameter, which the user may have moved."""
        if self._rows and not self._is_padded:
            rows = self._rows_of_part()
            if rows.data_ptr() != self.updated.data_ptr():
                self.updated.data = rows

    def leave(self) -> None:
        """Let go of the rows that lie in the user's parameter, until `follow`: it may be moved, and nobody else looks
        at its memory then."""
        if self._rows and not self._is_padded and not self.is_divided:
            self.updated.data = self.updated.data.new_empty((0, *self.updated.shape[1:]))

    def held(self) -> Iterator[HeldPart]:
        """The rank's parts, on all ranks in the same order."""
        if self.is_divided:
            yield self._held_part(self.name, self.part, self.whole, self.layout)
        for name, shown in self.shown.items():
            yield self._held_part(f"{self.name}/{name}", self.state[name], shown, self.state_layout)

    def _held_part(self, key: str, part: torch.Tensor, whole: torch.Tensor, layout: Layout) -> HeldPart:
        group, by = joined_group(layout, self.mesh), holders(layout, self.mesh, self.rank)
        return HeldPart(key, group, by, part, whole, layout)

    def memory_of(self, piece: HeldPart) -> torch.Tensor:
        """What this rank gives for a gather: its part, or memory of the size of one where others alone hold any."""
        if self.rank in piece.holders:
            return piece.part.detach()
        return torch.empty_like(self.part.detach(), dtype=piece.part.dtype)

    def wholes(self) -> Iterator[torch.Tensor]:
        """The user's tensors, in the order of `held`."""
        if self.is_divided:
            yield self.whole
        yield from self.shown.values()

    def take(self) -> None:
        """Copy this rank's part out of the whole parameter. Raises ConfigValueError if its shape has changed."""
        if not self.is_divided:
            return
        self.changes += self.was_written()
        part = self._part_of(self.whole, self.layout)
        if part.shape != self.part.shape:
            raise ConfigValueError(
                f"parameter {self.name} has now shape {tuple(self.whole.shape)} and parts of {tuple(part.shape)}, but "
                f"the step was compiled for parts of {tuple(self.part.shape)}: compile it again"
            )
        if part.dtype != self.part.dtype or part.device != self.part.device:
            self.part.data = part
        else:
            self.part.copy_(part)

    def note_gathered(self) -> None:
        """The whole parameter has the values of the parts now."""
        self._gathered = self._place_of_whole()

    def was_written(self) -> bool:
        """Whether the user has written to the whole parameter since it was gathered, or has replaced its memory."""
        return self._gathered != self._place_of_whole()

    def _place_of_whole(self) -> tuple[int, int]:
        return self.whole._version, self.whole.data_ptr()

    def part_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank has of a whole gradient, in memory of its own."""
        return self._part_of(gradient, self.state_layout).clone()

    def held_gradient(self, part: torch.Tensor, shown: torch.Tensor) -> HeldPart:
        """This rank's part of a gradient, which `shown` stands for."""
        return self._held_part(f"{self.name}.grad", part, shown, self.state_layout)

    def has_state_of(self, held: dict[str, Any]) -> bool:
        """Whether the user's state is still what `show` made it."""
        return held.keys() == self.state.keys() and all(
            value is self.shown.get(name, self.state[name]) for name, value in held.items()
        )

    def take_state(self, held: dict[str, Any], is_whole: bool) -> list[torch.Tensor]:
        """Take this rank's parts of the user's states, and forget states that the user has removed.

        held: the states in the user's optimizer. is_whole: whether the tensors in `shown` hold values, which the user
        may have changed. Returns the tensors of `shown` that are no longer in the user's optimizer.
        """
        dropped: list[torch.Tensor] = []
        for name in [name for name in self.state if name not in held]:
            del self.state[name]
        for name in [name for name, shown in self.shown.items() if held.get(name) is not shown]:
            dropped.append(self.shown.pop(name))
        for name, value in held.items():
            if not self.is_like_the_whole(value):
                self.state[name] = value
            elif is_whole or name not in self.shown:
                self._take_into(name, value)
        return dropped

    def show(self, held: dict[str, Any]) -> list[torch.Tensor]:
        """Put all states into `held`, the user's. Returns the whole tensors made for this; they have no memory yet."""
        made: list[torch.Tensor] = []
        for name, value in self.state.items():
            if self._is_like_the_part(value):
                if name not in self.shown:
                    self.shown[name] = torch.empty_like(self.whole, dtype=value.dtype, requires_grad=False)
                    made.append(self.shown[name])
                    free(self.shown[name])
                held[name] = self.shown[name]
            else:
                held[name] = value
        return made

    def put_state(self, states: Mapping[str, Any]) -> list[torch.Tensor]:
        """Take states of the part in place of those that it has. `show` has to follow.

        Returns the tensors of `shown` that stand for nothing any more.
        """
        gone = [name for name in self.state if name not in states]
        dropped = [self.shown.pop(name) for name in gone if name in self.shown]
        for name in gone:
            del self.state[name]
        for name, value in states.items():
            if self._is_like_the_part(value):
                self._put_part(name, value)
            else:
                self.state[name] = value
        return dropped

    def fill(self, piece: HeldPart, parts: list[torch.Tensor]) -> None:
        """Write a whole tensor from the parts of all ranks of the group, in the order of the mesh."""
        piece.whole.copy_(whole_of(parts, piece.layout, self.mesh, self.rank, piece.whole.shape))

    def _part_of(self, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
        return part_of(whole.detach(), layout, self.mesh, self.rank)

    def _take_into(self, name: str, value: torch.Tensor) -> None:
        self._put_part(name, self._part_of(value, self.state_layout))

    def _put_part(self, name: str, part: torch.Tensor) -> None:
        old = self.state.get(name)
        if isinstance(old, torch.Tensor) and old.shape == part.shape and old.dtype == part.dtype:
            if old.device == part.device:
                old.copy_(part)
                return
        self.state[name] = torch.empty_like(self.updated, dtype=part.dtype, requires_grad=False).copy_(part)

    def is_like_the_whole(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.whole.shape

    def _is_like_the_part(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.updated.shape


def gather(exchange: Exchange, pieces: Iterable[tuple[DividedParameter, HeldPart]]) -> None:
    """Fill whole tensors from the parts of all ranks."""
    by_group: dict[tuple[str, tuple[int, ...]], list[tuple[DividedParameter, HeldPart]]] = {}
    for each, piece in pieces:
        by_group.setdefault((piece.group, piece.holders), []).append((each, piece))
    for (group, holding), found in by_group.items():
        keys, parts = [piece.key for _, piece in found], [each.memory_of(piece) for each, piece in found]
        arriving = exchange.gather(group, holding, keys, parts)
        for (each, piece), ranks in zip(found, arriving, strict=True):
            allocate(piece.whole)
            each.fill(piece, list(ranks))


def _rows_of(param: Parameter, mesh: Mesh, rank: int) -> tuple[int, int]:
    """The first row that a rank updates, and how many these are."""
    rows, index = rows_per_rank(param, mesh), mesh.index(param.shard, rank)
    if param.owner is not None:
        return 0, rows if index == param.owner else 0
    return index * rows, rows


def free(tensor: torch.Tensor) -> bool:
    """Release a tensor's memory, unless other tensors such as views use it too. Returns whether it was released."""
    torch.autograd.graph.increment_version(tensor)  # so that a backward that needs the old values raises
    if has_aliases(tensor):
        return False
    storage = tensor.untyped_storage()
    if not storage.resizable() or _is_mapped(storage):  # it has been lent to numpy, or is a mapped file
        tensor.data = torch.empty_like(tensor)
        storage = tensor.untyped_storage()
    storage.resize_(0)
    return True


def _is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether the storage lies in memory that processes share, as after a tensor was sent to a spawned process.

    Growing such a storage crashes: it has no allocator, although it says that it is resizable (torch 2.13).
    """
    return storage.device.type == "cpu" and storage.is_shared()


def allocate(tensor: torch.Tensor) -> None:
    """Give a released tensor memory again. Its values are undefined."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(_extent(tensor) * tensor.element_size())


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the beginning of the storage to the tensor's last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1
