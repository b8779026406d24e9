"""A divided parameter: the step works on this rank's parts, and the user sees whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import Parameter
from commfuse_fx.runtime.checkpoint.places import Place
from commfuse_fx.runtime.memory.layout import dividing, joined_group, part_of, whole_of
from commfuse_fx.runtime.memory.own_storage import has_aliases


class DividedParameter:
    """A parameter of which this rank keeps a part, with its optimizer states.

    whole: the user's parameter.
    part: this rank's part of it.
    state: the optimizer states of the part, by name.
    shown: the whole tensors that the user's optimizer has for states of the parameter's shape. Other states, such as a
        step count, are the same objects in both.
    """

    def __init__(self, param: Parameter, whole: nn.Parameter, mesh: Mesh, rank: int) -> None:
        self.name = param.name
        self.whole = whole
        self.layout = dividing(param.layout, mesh)
        self.group = joined_group(self.layout, mesh)
        self.mesh = mesh
        self.rank = rank
        self.part = nn.Parameter(param.spec.empty(whole.device), requires_grad=False)
        self.state: dict[str, Any] = {}
        self.shown: dict[str, torch.Tensor] = {}

    @cached_property
    def place(self) -> Place:
        """Where the part lies in the whole parameter."""
        return Place.of_layout(self.whole.shape, self.layout, self.mesh, self.rank)

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The rank's tensors by keys that are the same on all ranks, in the same order."""
        yield self.name, self.part
        for state in self.shown:
            yield f"{self.name}/{state}", self.state[state]

    def wholes(self) -> Iterator[torch.Tensor]:
        """The user's tensors, in the order of `parts`."""
        yield self.whole
        yield from self.shown.values()

    def take(self) -> None:
        """Copy this rank's part out of the whole parameter. Raises ConfigValueError if its shape has changed."""
        part = self._part_of(self.whole)
        if part.shape != self.part.shape:
            raise ConfigValueError(
                f"parameter {self.name} has now shape {tuple(self.whole.shape)} and parts of {tuple(part.shape)}, but "
                f"the step was compiled for parts of {tuple(self.part.shape)}: compile it again"
            )
        if part.dtype != self.part.dtype or part.device != self.part.device:
            self.part.data = part
        else:
            self.part.copy_(part)

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
            if not self._is_like_the_whole(value):
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

    def fill(self, whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Write the whole tensor from the parts of all ranks of the group, in the order of the mesh."""
        whole.copy_(whole_of(parts, self.layout, self.mesh, self.rank))

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        return part_of(whole.detach(), self.layout, self.mesh, self.rank)

    def _take_into(self, name: str, value: torch.Tensor) -> None:
        self._put_part(name, self._part_of(value))

    def _put_part(self, name: str, part: torch.Tensor) -> None:
        old = self.state.get(name)
        if isinstance(old, torch.Tensor) and old.shape == part.shape and old.dtype == part.dtype:
            if old.device == part.device:
                old.copy_(part)
                return
        self.state[name] = torch.empty_like(self.part, dtype=part.dtype, requires_grad=False).copy_(part)

    def _is_like_the_whole(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.whole.shape

    def _is_like_the_part(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.part.shape


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
