"""The device mesh as the compiler sees it: named axes over a list of ranks.

Graphs name axes ("dp"); only code generation turns a name into ranks or a process group. That keeps
one graph for every rank and the cost of compiling independent of the size of the world.

Why: docs/decisions.md, "Groups are names of mesh axes".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

DEFAULT_NAMES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Mesh:
    """`shape[i]` devices along the axis `names[i]`; `devices` lists the ranks in row-major order (None: 0..n-1)."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    devices: tuple[int, ...] | None = None

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Mesh:
        """A mesh of these sizes with default axis names: dp, tp, pp, cp, then axis4, axis5, ..."""
        names = tuple(DEFAULT_NAMES[i] if i < len(DEFAULT_NAMES) else f"axis{i}" for i in range(len(sizes)))
        return cls(tuple(sizes), names)

    @classmethod
    def of_device_mesh(cls, device_mesh: Any) -> Mesh:
        """The same axes and ranks as a torch.distributed DeviceMesh."""
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or cls.of_sizes(tuple(ranks.shape)).names
        return cls(tuple(ranks.shape), tuple(names), tuple(int(r) for r in ranks.flatten().tolist()))

    @property
    def world(self) -> int:
        return prod(self.shape)

    @property
    def all_axes(self) -> str:
        """The group of all devices, written as its axes."""
        return ",".join(self.names)

    def size(self, group: str) -> int:
        """Number of devices in a group written as axis names joined by commas. Raises KeyError on an unknown axis."""
        return prod(self.shape[self._axis(name)] for name in group.split(","))

    def ranks(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group that `rank` belongs to, in the order of the mesh."""
        axes = {self._axis(name) for name in group.split(",")}
        mine = self.coordinate(rank)
        members: list[int] = []
        for position in range(self.world):
            coordinate = self._unravel(position)
            if all(coordinate[i] == mine[i] for i in range(len(self.shape)) if i not in axes):
                members.append(self._rank_at(position))
        return tuple(members)

    def groups(self, group: str) -> list[tuple[int, ...]]:
        """The ranks of all groups along these axes, each in the order of the mesh."""
        axes = {self._axis(name) for name in group.split(",")}
        members = self._positions(axes)
        firsts = self._positions(set(range(len(self.shape))) - axes)
        return [tuple([self._rank_at(first + each) for each in members]) for first in firsts]

    def index(self, group: str, rank: int) -> int:
        """Position of `rank` inside its group."""
        index = 0
        mine = self.coordinate(rank)
        for axis in sorted(self._axis(name) for name in group.split(",")):
            index = index * self.shape[axis] + mine[axis]
        return index

    def parts_of(self, name: str) -> list[str]:
        """The axes that an axis of this name has been split into, or itself; none where there is no such axis."""
        return [each for each in self.names if each == name or each.startswith(f"{name}.")]

    def last_axes(self, group: str, size: int) -> str:
        """The last axes of a group whose product is `size`: the group of its neighbouring ranks. "": there are none."""
        found: list[str] = []
        for name in [name for name in reversed(self.names) if name in group.split(",")]:
            found.insert(0, name)
            if self.size(",".join(found)) >= size:
                break
        inner = ",".join(found)
        return inner if self.size(inner) == size else ""

    def other_axes(self, group: str, inner: str) -> str:
        """The axes of a group that are not among those of `inner`; "" if all are."""
        return ",".join(name for name in group.split(",") if name not in inner.split(","))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Row-major coordinate of a rank."""
        return self._unravel(rank if self.devices is None else self.devices.index(rank))

    def __str__(self) -> str:
        return "x".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    def _axis(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(f"no mesh axis {name!r}; axes are {', '.join(self.names)}")
        return self.names.index(name)

    def _positions(self, axes: set[int]) -> list[int]:
        """The row-major positions that one comes to from the first device along these axes."""
        found = [0]
        for axis in sorted(axes):
            stride = prod(self.shape[axis + 1 :])
            found = [position + i * stride for position in found for i in range(self.shape[axis])]
        return found

    def _rank_at(self, position: int) -> int:
        return position if self.devices is None else self.devices[position]

    def _unravel(self, position: int) -> tuple[int, ...]:
        coordinate: list[int] = []
        for size in reversed(self.shape):
            coordinate.append(position % size)
            position //= size
        return tuple(reversed(coordinate))
