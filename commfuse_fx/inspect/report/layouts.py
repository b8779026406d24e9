"""How parameters and what modules compute lie on the mesh: the rows of the report's picture of layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import R
from commfuse_fx.ir.core.program import ModuleResult, Parameter, Program
from commfuse_fx.ir.text.write_text import spec_text

PARAMETER, RESULT = "parameter", "result"


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Parameters, or results of modules, that are alike in repeated layers.

    name: such as "h.0-11.mlp.c_fc.weight" for twelve. kind: "parameter", or "result" of a module.
    value: dtype and shape of the whole tensor. nbytes, on_rank: bytes of one of them, and what a rank holds of it.
    cells: how it lies on each mesh axis: "R", "S(0)", "P", or "own" for another value on each rank.
    """

    name: str
    kind: str
    count: int
    value: str
    nbytes: int
    on_rank: int
    cells: tuple[str, ...]


@dataclass(frozen=True)
class LayoutPicture:
    """axes: name and size of each mesh axis. rows: by module, in the order of the forward."""

    axes: tuple[tuple[str, int], ...]
    rows: tuple[LayoutRow, ...]


def layout_picture(program: Program) -> LayoutPicture | None:
    """The picture of a graph that is divided; None for another one."""
    if not program.config.divides_graphs:
        return None
    mesh = program.mesh
    results = {each.module: each for each in program.module_results}
    held: dict[str, list[Parameter]] = {module: [] for module in results}
    for name, param in program.params.items():
        held.setdefault(name.rpartition(".")[0], []).append(param)
    rows: list[LayoutRow] = []
    for module, params in held.items():
        rows.extend(_of_parameter(param, mesh) for param in params)
        if module in results:
            rows.append(_of_result(results[module], mesh))
    return LayoutPicture(tuple(zip(mesh.names, mesh.shape, strict=True)), tuple(_collapsed(rows)))


def _of_parameter(param: Parameter, mesh: Mesh) -> LayoutRow:
    whole = param.whole or param.spec
    cells = [str(R)] * len(mesh.names)
    for group, placement in param.layout:
        for axis in group.split(","):
            cells[mesh.names.index(axis)] = str(placement)
    return LayoutRow(
        param.name, PARAMETER, 1, spec_text(whole), whole.nbytes, param.spec.nbytes, tuple(map(str, cells))
    )


def _of_result(result: ModuleResult, mesh: Mesh) -> LayoutRow:
    found: dict[str, str] = {}
    parts = 1
    for entry in filter(None, result.layout.split("; ")):
        group, _, placement = entry.partition(": ")
        found.update(dict.fromkeys(group.split(","), placement))
    for axis, size in zip(mesh.names, mesh.shape, strict=True):
        parts *= size if found.get(axis, "").startswith("S") else 1
    cells = tuple(found.get(axis, str(R)) for axis in mesh.names)
    return LayoutRow(result.module, RESULT, 1, result.value, result.nbytes, result.nbytes // parts, cells)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _collapsed(rows: Sequence[LayoutRow]) -> Iterator[LayoutRow]:
    """Layers that differ in their number alone, which is the first one of their names, are one."""
    layers: dict[tuple[str, int], list[LayoutRow]] = {}  # what stands in front of the number, and the number
    for place, row in enumerate(rows):
        found = _NUMBER.search(row.name)
        layer = ("", -1 - place) if found is None else (row.name[: found.start()], int(found[0]))
        layers.setdefault(layer, []).append(row)
    alike: dict[tuple[str, tuple[LayoutRow, ...]], list[int]] = {}
    for (before, number), own in layers.items():
        without_number = tuple(replace(row, name=_NUMBER.sub("*", row.name, count=1)) for row in own)
        alike.setdefault((before, without_number), []).append(number)
    for (before, _), numbers in alike.items():
        for row in layers[before, numbers[0]]:
            name = _NUMBER.sub(_ranges(numbers), row.name, count=1) if len(numbers) > 1 else row.name
            yield replace(row, name=name, count=len(numbers))


def _ranges(numbers: Sequence[int]) -> str:
    """As in "0-5,7"."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
