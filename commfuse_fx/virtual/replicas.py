"""Compare the values that ranks must have in common, and find the first node where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import group_of, is_start, is_wait, kind_of
from commfuse_fx.ir.core.dependence import Roots, written_nodes
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Parameter, Program, Source
from commfuse_fx.ir.ops.unwritten import is_unwritten
from commfuse_fx.ir.rows.shard_rows import gives_rows
from commfuse_fx.ir.updates.updates import is_scalar

_SAME_FOR_ALL = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True)
class Disagreement:
    """A disagreement: two ranks should hold the same value, and do not.

    node: the canonical name of the node that computes the value.
    ranks: the two ranks.
    difference: the largest absolute difference of elements. NaN if one rank has a NaN, or if shapes differ.
    phase, module, source: the place of the node in the step. The source is `file:line`, or "" if it is unknown.
    """

    node: str
    ranks: tuple[int, int]
    difference: float
    phase: str
    module: str
    source: str

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        line = f", {self.source}" if self.source else ""
        return (
            f"ranks {self.ranks[0]} and {self.ranks[1]} disagree from {self.node} on: they differ by up to "
            f"{self.difference:.3g} ({self.phase}{where}{line})"
        )


class Replicas:
    """An observer of `RanksProgram` that compares, node by node, the values that ranks must have in common.

    tolerance: how much values may differ, relative to their size or to 1. 0 compares bit by bit; NaN equals NaN.
    first: the first disagreement in the order of the step, or None.
    compared: the number of values that were compared.
    """

    def __init__(self, program: Program, tolerance: float = 0.0) -> None:
        self.mesh = program.mesh
        self.tolerance = tolerance
        self.first: Disagreement | None = None
        self.compared = 0
        self._varies = variation(program)
        self._written = _updated(program, self._varies)
        self._memory: Sequence[Mapping[fx.Node, Any]] = ()  # what the ranks' updates write
        self._partners: dict[str, list[tuple[int, int]]] = {}

    def given(self, values: Sequence[Mapping[fx.Node, Any]], nodes: Sequence[fx.Node]) -> None:
        """Compare the inputs of a step, before it begins."""
        for node in nodes:
            self._compare(node, node, values)
        self._memory = [{node: each[node] for node in nodes} for each in values]

    def __call__(self, node: fx.Node, values: Sequence[Mapping[fx.Node, Any]]) -> None:
        if is_start(node) or is_unwritten(node):
            return  # its value is undefined until the wait, or until a node writes to it
        self._compare(node, node, values)
        for written in self._written.get(node, ()):
            self._compare(written, node, self._memory)

    def _compare(self, node: fx.Node, where: fx.Node, values: Sequence[Mapping[fx.Node, Any]]) -> None:
        varies = self._varies.get(node)
        if self.first is not None or varies is None:
            return
        self.compared += 1
        for one, other in self._pairs(varies):
            difference = _difference(values[one][node], values[other][node], self.tolerance)
            if difference is not None:
                details = info(where)
                self.first = Disagreement(
                    details.name, (one, other), difference, details.phase, details.module, details.source
                )
                return

    def _pairs(self, varies: str) -> list[tuple[int, int]]:
        """Pairs of ranks to compare: each rank with the first rank that must hold the same value."""
        if varies not in self._partners:
            first: dict[tuple[int, ...], int] = {}
            axes = [self.mesh.names.index(name) for name in varies.split(",") if name]
            pairs: list[tuple[int, int]] = []
            for rank in range(self.mesh.world):
                place = self.mesh.coordinate(rank)
                one = first.setdefault(tuple(place[axis] for axis in axes), rank)
                if one != rank:
                    pairs.append((one, rank))
            self._partners[varies] = pairs
        return self._partners[varies]


def variation(program: Program) -> dict[fx.Node, str]:
    """The mesh axes along which ranks may hold different values of a node; nodes without known axes are left out.

    The axes come from `NodeInfo.varies`. If that is None, they follow from collectives, whose results are equal on all
    ranks of the group, and from parameters and optimizer states, which are equal on ranks that hold the same part.
    """
    found: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        varies, source = info(node).varies, program.sources.get(node)
        if source is not None and (varies is None or _is_in_rows(program, source)):
            varies = _of_source(program, source)
        if varies is None and is_wait(node):
            start = node.args[0]
            assert isinstance(start, fx.Node)
            if is_start(start) and kind_of(start) in _SAME_FOR_ALL:
                varies = _others(program.mesh, group_of(start))
        if varies is not None:
            found[node] = varies
    return found


def _is_in_rows(program: Program, source: Source) -> bool:
    """Whether it is a parameter of which a rank keeps its rows alone, which is decided behind a division."""
    return source.kind == "parameter" and program.params[source.name].rows_alone


def _of_source(program: Program, source: Source) -> str | None:
    if source.kind == "hyper":
        return ""
    if source.kind == "parameter":
        return _of_parameters(program, [source.name])
    if source.kind == "flat":
        segments = program.updates[source.owner].segments
        segment = next(each for each in segments if each.members[0][0] == source.name)
        return _of_parameters(program, [name for name, _ in segment.members])
    if source.kind == "state":
        segments = program.updates[source.owner].segments
        names = [name for segment in segments for name, _ in segment.members]
        return _of_parameters(program, names, of_updates=not is_scalar(source.name))
    return None


def _of_parameters(program: Program, names: Sequence[str], of_updates: bool = False) -> str | None:
    """The axes that divide these parameters, or their updates; None if every rank trains them by itself."""
    mode = program.config.parallel_mode
    params = [program.params[name] for name in names]
    if mode == "stand_alone" or (mode == "hybrid_parallel" and any(param.layerwise_parallel for param in params)):
        return None
    return _joined(program.mesh, [axis for param in params for axis in _axes(param, of_updates)])


def _axes(param: Parameter, of_updates: bool) -> list[str]:
    groups = [group for group, _ in param.layout] + ([param.shard] if of_updates else [])
    return [axis for group in groups for axis in group.split(",")]


def _joined(mesh: Mesh, axes: Sequence[str]) -> str:
    return ",".join(name for name in mesh.names if name in axes)


def _others(mesh: Mesh, group: str) -> str:
    return ",".join(name for name in mesh.names if name not in group.split(","))


def _updated(program: Program, varies: Mapping[fx.Node, str]) -> dict[fx.Node, list[fx.Node]]:
    """For each update node the parameters, states and buffers that it writes, if ranks must have them in common.

    Parameters of which this rank updates its own part are in common again when the other parts have been copied there.
    """
    roots = Roots(program.graph, program.aliases())
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and info(node).phase == "update":
            for written in written_nodes(node):
                root = roots[written]
                if gives_rows(written):
                    continue
                if root in program.sources and program.sources[root].kind in ("parameter", "flat", "state", "buffer"):
                    if root in varies and root not in found.setdefault(node, []):
                        found[node].append(root)
    return found


def _difference(one: Any, other: Any, tolerance: float) -> float | None:
    """The largest absolute difference of two values; None if they count as equal."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        found = [_difference(a, b, tolerance) for a, b in zip(one, other, strict=True)]
        known = [each for each in found if each is not None]
        return max(known) if known else None
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if one == other else float("nan")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("nan")
    if torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    if one.dtype == torch.bool:
        return 1.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max())
