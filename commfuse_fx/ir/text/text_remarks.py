"""Reads the remarks in braces behind a node of canonical text: its collective, and when it runs and sends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.collectives import group_of, is_start, kind_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import CollectiveInfo, Stretch, info
from commfuse_fx.ir.ops.values import DTYPES
from commfuse_fx.ir.text.text_lines import TextLine, read_collective, read_sends

_REST = "sends the rest: "
_KEPT = "kept between steps"
_ONCE = "computed once"
_NEXT_STEP = "in the next step, before "
_REGION = re.compile(r"region (\d{1,9})(, rounded)?")


class ErrorWithFix(Protocol):
    """Makes the error for a line, with what to write instead."""

    def __call__(self, number: int, problem: str, fix: str = ...) -> ConfigValueError: ...


class RemarkReader:
    """Reads the remarks of one text. nodes: all of its nodes by name, since a remark may name one behind it."""

    def __init__(self, mesh: Mesh, nodes: Mapping[str, fx.Node], error: ErrorWithFix) -> None:
        self.mesh = mesh
        self.nodes = nodes
        self.error = error

    def read(self, node: fx.Node, line: TextLine) -> None:
        """Write what the remarks on a node say into its metadata."""
        details = info(node)
        for remark in line.remarks:
            sends = read_sends(remark)
            if remark == _KEPT:
                details.kept = True
            elif (region := _REGION.fullmatch(remark)) is not None:
                details.region, details.rounded = int(region[1]), region[2] is not None
            elif remark == _ONCE:
                details.once = True
            elif remark.startswith(_NEXT_STEP):
                details.next_step = self.named(line, remark.removeprefix(f"{_NEXT_STEP}%"))
            elif remark.startswith(_REST):
                stretches = remark.removeprefix(_REST).split(" ")
                parts = [read_sends(f"sends {line.name} {each}") for each in stretches]
                details.rest = tuple(Stretch(each[1], each[2]) for each in parts if each is not None)
            elif sends is not None:
                details.sends = (*details.sends, (self.named(line, sends[0]), Stretch(*sends[1:])))
            elif remark.startswith("group=") and is_start(node):
                details.collective = self.collective(node, line, remark)
            else:
                raise self.error(line.number, f"{remark[:80]!r} is no remark that a node can have")
        if is_start(node) and details.collective is None:
            fix = "write `{group=dp(2) op=sum dtype=f32 bytes=8 members=[a]}` behind the call"
            raise self.error(line.number, "nothing says what this collective does", fix)

    def named(self, line: TextLine, name: str) -> fx.Node:
        if name not in self.nodes:
            raise self.error(line.number, f"it refers to {name[:80]}, and no line has this name", "name one that has")
        return self.nodes[name]

    def collective(self, node: fx.Node, line: TextLine, remark: str) -> CollectiveInfo:
        said = read_collective(remark)
        if said is None or said.dtype not in DTYPES:
            fix = "write `{group=dp(2) op=sum dtype=f32 bytes=8 members=[a]}`"
            raise self.error(line.number, f"{remark[:80]!r} does not describe a collective", fix)
        try:
            size = self.mesh.size(said.group)
        except KeyError as problem:
            raise self.error(line.number, str(problem.args[0]), "name axes of the mesh") from None
        if size != said.size or group_of(node) != said.group:
            fix = f"write group={group_of(node)}, and the size that the mesh {self.mesh} gives it"
            raise self.error(line.number, f"group {said.group}({said.size}) is not that of the call", fix)
        return CollectiveInfo(
            kind_of(node),
            group=said.group,
            dtype=DTYPES[said.dtype],
            nbytes=said.nbytes,
            members=tuple(said.members.split(", ")) if said.members else (),
            sequence=0,
            reduce_op=said.reduce_op or None,
            fusion_id=said.fusion_id,
        )
