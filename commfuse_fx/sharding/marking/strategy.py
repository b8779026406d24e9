"""Strategies of single tensors in all notations of `cf.shard`, and layouts on a mesh."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import Partial, Placement, R, Replicate, Shard
from commfuse_fx.support.checks import is_int, show

_NOTATIONS = (
    'slices per dimension such as (2, 1), mesh axes per dimension such as ("dp", None), one placement per mesh axis '
    'such as [Shard(0), Replicate()], or placements by axis such as {"tp": "S(1)"}'
)


@dataclass(frozen=True, slots=True)
class Counts:
    """A strategy of counts: dimension d has slices[d] equal slices. Mesh axes are chosen when the mesh is known."""

    slices: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.slices)


@dataclass(frozen=True, slots=True)
class Axes:
    """A strategy of axis names: the mesh axes names[d] divide dimension d, outermost first."""

    names: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        entries = [repr(each[0]) if len(each) == 1 else repr(each or None) for each in self.names]
        return f"({', '.join(entries)}{',' if len(entries) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class Placements:
    """A strategy of placements by mesh axis. An axis is its name, or its position in the mesh (-1 for the last).

    For an axis that is not listed the compiler chooses. Dimensions may be negative until the tensor's shape is known.

    total: the number of axes that the mesh has to have, if placements are given by position; else None.
    """

    by_axis: tuple[tuple[str | int, Placement], ...]
    total: int | None = None

    def __str__(self) -> str:
        if self.total is None:
            return f"{{{', '.join(f'{axis!r}: {placement}' for axis, placement in self.by_axis)}}}"
        given = dict(self.by_axis)
        return f"[{', '.join(str(given.get(position)) for position in range(self.total))}]"


TensorStrategy = Counts | Axes | Placements


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor on a mesh: a placement for each axis that is decided, in the order of the mesh.

    An axis that is not listed is left open.
    """

    placements: tuple[tuple[str, Placement], ...]

    def get(self, axis: str) -> Placement | None:
        """The placement on an axis; None where it is left open."""
        return dict(self.placements).get(axis)

    def divided(self) -> tuple[tuple[str, Shard], ...]:
        """The axes that divide the tensor."""
        return tuple((axis, placement) for axis, placement in self.placements if isinstance(placement, Shard))

    def agrees(self, other: Layout) -> bool:
        """Whether both layouts have the same placement on every axis that both decide."""
        theirs = dict(other.placements)
        return all(theirs.get(axis, placement) == placement for axis, placement in self.placements)

    def joined(self, other: Layout, mesh: Mesh) -> Layout:
        """The placements of both layouts, which have to agree."""
        both = dict(self.placements) | dict(other.placements)
        return Layout(tuple((axis, both[axis]) for axis in mesh.names if axis in both))

    def __str__(self) -> str:
        return ", ".join(f"{placement} on {axis}" for axis, placement in self.placements) or "open"


def parse_tensor(value: Any, argument: str) -> TensorStrategy:
    """The strategy of one tensor. `argument` names it in messages.

    Raises ConfigTypeError (no known notation, a count that is no int) or ConfigValueError (a count < 1, an axis named
    twice, a partial sum).
    """
    if isinstance(value, (Counts, Axes, Placements)):
        return value
    if isinstance(value, Mapping):
        return _by_axis(value, argument)
    if is_placement(value):
        return Placements(((0, parse_placement(value, argument)),), 1)
    if not _is_sequence(value):
        raise ConfigTypeError(f"{argument} is {show(value)}; give {_NOTATIONS}")
    if any(map(is_placement, value)):
        return _by_position(value, argument)
    if len(value) == 1 and _is_sequence(value[0]) and any(map(is_int, value[0])):
        return parse_tensor(value[0], argument)  # one tuple per input, of which there is one
    if any(isinstance(entry, str) or entry is None or _is_sequence(entry) for entry in value):
        return _named(value, argument)
    return Counts(tuple(_count(entry, dim, value, argument) for dim, entry in enumerate(value)))


def parse_tensors(value: Any, argument: str) -> tuple[TensorStrategy | None, ...]:
    """One strategy per tensor, None for those that stay unmarked.

    A strategy that is not wrapped in a tuple is that of the first tensor, where it cannot be meant otherwise:
    `(2, 1)`, `("dp", None)`, `{"tp": "S(1)"}`, `[Shard(0), Replicate()]`. Raises as `parse_tensor` does.
    """
    if value is None:
        return ()
    if isinstance(value, (Counts, Axes, Placements, Mapping)) or is_placement(value):
        return (parse_tensor(value, argument),)
    if not _is_sequence(value):
        raise ConfigTypeError(f"{argument} is {show(value)}; give one strategy per tensor, each as {_NOTATIONS}")
    if any(isinstance(entry, (str, int, float)) or is_placement(entry) for entry in value):
        return (parse_tensor(value, argument),)
    return tuple(
        None if entry is None else parse_tensor(entry, f"{argument}[{number}]") for number, entry in enumerate(value)
    )


def on_axis(strategy: TensorStrategy, axis: str | None) -> TensorStrategy:
    """The same with `axis` in place of "the last axis of the mesh"; unchanged if `axis` is None."""
    if axis is None or not isinstance(strategy, Placements) or strategy.total is not None:
        return strategy
    return Placements(tuple((axis if key == -1 else key, placement) for key, placement in strategy.by_axis))


def encode(strategy: TensorStrategy) -> str:
    """A strategy as text. `decode` is the inverse."""
    if isinstance(strategy, Counts):
        return repr(("counts", strategy.slices))
    if isinstance(strategy, Axes):
        return repr(("axes", strategy.names))
    return repr(("placements", tuple((axis, str(placement)) for axis, placement in strategy.by_axis), strategy.total))


def decode(text: str) -> TensorStrategy:
    """The inverse of `encode`."""
    kind, content, *rest = ast.literal_eval(text)
    if kind == "counts":
        return Counts(content)
    if kind == "axes":
        return Axes(content)
    return Placements(tuple((axis, parse_placement(placement, text)) for axis, placement in content), rest[0])


def is_placement(value: Any) -> bool:
    """Whether `value` is a placement, of torch.distributed.tensor or ours."""
    if isinstance(value, (Replicate, Shard, Partial)):
        return True
    return type(value).__module__.startswith("torch.distributed") and hasattr(value, "is_replicate")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _count(entry: Any, dim: int, value: Any, argument: str) -> int:
    if not is_int(entry):
        raise ConfigTypeError(
            f"{argument} is {show(value)}, in which entry {dim} is {show(entry)}; give the number of slices as an int, "
            f"or {_NOTATIONS}"
        )
    if entry < 1:
        raise ConfigValueError(f"{argument} is {show(value)}, in which entry {dim} is {entry}; give a count >= 1")
    return entry


def _named(value: Sequence[Any], argument: str) -> Axes:
    names: list[tuple[str, ...]] = []
    for dim, entry in enumerate(value):
        each = () if entry is None else tuple(entry) if _is_sequence(entry) else (entry,)
        for name in each:
            if not isinstance(name, str):
                mixed = ": counts and axis names do not mix" if is_int(name) else ""
                raise ConfigTypeError(
                    f"{argument} is {show(value)}, in which entry {dim} is {show(entry)}{mixed}; give {_NOTATIONS}"
                )
        names.append(each)
    used: dict[str, int] = {}
    for dim, each in enumerate(names):
        for name in each:
            if name in used:
                raise ConfigValueError(
                    f"{argument} is {show(value)}, which uses axis {name!r} twice (dimensions {used[name]} and {dim}); "
                    "an axis divides one dimension of a tensor"
                )
            used[name] = dim
    return Axes(tuple(names))


def _by_position(value: Sequence[Any], argument: str) -> Placements:
    for position, entry in enumerate(value):
        if entry is not None and not is_placement(entry):
            raise ConfigTypeError(
                f"{argument} is {show(value)}, in which entry {position} is {show(entry)}; give one placement per mesh "
                "axis, None for an axis to be left open"
            )
    given = [(i, parse_placement(entry, argument)) for i, entry in enumerate(value) if entry is not None]
    return Placements(tuple(given), len(value))


def _by_axis(value: Mapping[Any, Any], argument: str) -> Placements:
    for axis in value:
        if not isinstance(axis, str):
            raise ConfigTypeError(
                f"{argument} is {show(value)}, in which the key {show(axis)} is no name of a mesh axis"
            )
    return Placements(tuple((axis, parse_placement(entry, f"{argument}[{axis!r}]")) for axis, entry in value.items()))


_SHARD = re.compile(r"S\((-?\d+)(?:;(\d+))?\)")


def parse_placement(value: Any, argument: str) -> Placement:
    """One placement: torch's, ours, or written as "S(1)".

    Raises ConfigTypeError for anything else, ConfigValueError for a partial sum.
    """
    if isinstance(value, (Replicate, Shard)):
        return value
    if isinstance(value, Partial) or (is_placement(value) and value.is_partial()):
        raise ConfigValueError(
            f"{argument} is {show(value)}: a mark cannot ask for partial sums; leave the axis open, they are kept "
            "wherever that is cheaper"
        )
    if isinstance(value, str):
        found = _SHARD.fullmatch(value)
        if found and found[2] != "0":
            return Shard(int(found[1]), int(found[2] or 1))
        if value == "R":
            return R
    elif is_placement(value):
        if value.is_replicate():
            return R
        if type(value).__name__ == "Shard":
            return Shard(int(value.dim))
    _refuse_placement(value, argument)


def _refuse_placement(value: Any, argument: str) -> NoReturn:
    raise ConfigTypeError(
        f'{argument} is {show(value)}; give Shard(dim), Replicate(), "S(dim)", "S(dim;blocks)" or "R"'
    )
