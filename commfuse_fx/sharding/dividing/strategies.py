"""The strategies of a whole step as a document: what a search has found, for people to review and for other runs.

Why: docs/decisions.md, "Strategies in a file are placements, and are applied as far as they fit".
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from commfuse_fx.config.parallel_optimizer import LEVELS
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.placement import P, Placement, divides
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.axis import Axis, Pin
from commfuse_fx.sharding.dividing.decisions import Decisions, State
from commfuse_fx.sharding.marking.strategy import parse_placement
from commfuse_fx.support.checks import check_int, check_text, show
from commfuse_fx.support.documents import Document, check_keys
from commfuse_fx.support.logs import logger
from commfuse_fx.support.strict_json import check_object

log = logger("sharding")

NOT_APPLIED = "strategy file, not applied"
"""Topic of notes that say where a strategy file and a step differ."""

_SHOWN = 5
"""Entries that an error lists."""

_WRITTEN = re.compile(r"R|S\(\d{1,9}(;0*[1-9]\d{0,8})?\)")
"""Placements other than P. Dimensions are counted from 0."""

_KEYS = ("mesh", "blocks", "parameters", "ops")
_LEVEL = "parallel_optimizer"
_PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class Strategies(Document, kind="strategies"):
    """Strategies say how each parameter and each op of a step lies on each axis of a mesh.

    mesh: the sizes of the axes, by name.
    axes: what is decided on each of them. Empty: the batch is divided over all of them, and nothing else.
    level: of the parallel optimizer, where the search has chosen it; 0: it is off. None: the user has a say.
    plan: what else has been chosen where plans of buckets and of their order were compared, by name. None: nothing was.

    Its text has a line for each parameter and each op, in the order of the graph: `"dp: S(0)"` for a parameter, and
    `"dp: S(0), R -> S(0)"` for an op with its inputs and results, with `"; "` between axes.
    """

    mesh: Mapping[str, int]
    axes: Mapping[str, Decisions] = field(hash=False)
    level: int | None = None
    plan: Mapping[str, float] | None = field(default=None, hash=False)

    def _body(self) -> Mapping[str, Any]:
        parameters: dict[str, list[str]] = {}
        ops: dict[str, list[str]] = {}
        for axis, decided in self.axes.items():
            for name, placement in decided.parameters.items():
                parameters.setdefault(name, []).append(f"{axis}: {placement}")
            for name, state in decided.states.items():
                ops.setdefault(name, []).append(f"{axis}: {_of_state(state)}")
        level = {} if self.level is None else {_LEVEL: self.level}
        return {
            "mesh": dict(self.mesh),
            **level,
            **({} if self.plan is None else {_PLAN: dict(self.plan)}),
            "blocks": {axis: list(decided.blocks) for axis, decided in self.axes.items()},
            "parameters": {name: "; ".join(each) for name, each in parameters.items()},
            "ops": {name: "; ".join(each) for name, each in ops.items()},
        }

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> Strategies:
        check_keys(body, where, _KEYS, (_LEVEL, _PLAN))
        level = body.get(_LEVEL)
        mesh = {
            name: check_int(size, f"{where}: mesh[{show(name)}]", 1, 1 << 20)
            for name, size in check_object(body["mesh"], f"{where}: mesh").items()
        }
        blocks = check_object(body["blocks"], f"{where}: blocks")
        parameters: dict[str, dict[str, Placement]] = {axis: {} for axis in blocks}
        states: dict[str, dict[str, State]] = {axis: {} for axis in blocks}
        for axis in blocks:
            if axis not in mesh:
                raise ConfigValueError(
                    f"{where}: blocks has axis {show(axis)}, but mesh has {', '.join(mesh) or 'no axes'}; use the "
                    "same axes in both"
                )
        for name, text in check_object(body["parameters"], f"{where}: parameters").items():
            place = f"{where}: parameters[{show(name)}]"
            for axis, rest in _by_axis(text, blocks, place):
                if rest == "P":
                    raise ConfigValueError(f'{place} is P, a partial sum; give "R" or "S(dim)" for a parameter')
                parameters[axis][name] = _placement(rest, place)
        for name, text in check_object(body["ops"], f"{where}: ops").items():
            place = f"{where}: ops[{show(name)}]"
            for axis, rest in _by_axis(text, blocks, place):
                states[axis][name] = _state(rest, place)
        return cls(
            mesh=mesh,
            axes={
                axis: Decisions(parameters[axis], states[axis], tuple(_counts(found, f"{where}: blocks[{show(axis)}]")))
                for axis, found in blocks.items()
            },
            level=None if level is None else check_int(level, f"{where}: {_LEVEL}", 0, LEVELS[-1]),
            plan=None if _PLAN not in body else _numbers(body[_PLAN], f"{where}: {_PLAN}"),
        )

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> Strategies:
        """Those of strategy_ckpt_load_file. Raises like `load`."""
        return cls.load(
            path, "give strategy_ckpt_load_file the path of a file that strategy_ckpt_save_file has written"
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ConfigValueError where the ranks are not as many, or another mesh was asked for."""
        own = Mesh(tuple(self.mesh.values()), tuple(self.mesh))
        asked = dict(zip(mesh.names, mesh.shape, strict=True))
        is_finer = len(mesh.names) == 1 and all(name.startswith(f"{mesh.names[0]}.") for name in self.mesh)
        if own.world != mesh.world or not (asked == dict(self.mesh) or is_finer):
            raise ConfigValueError(
                f"strategy_ckpt_load_file has strategies for the mesh {own}, but the step has {mesh}: search again on "
                "this mesh, or compile with the other one"
            )

    def check_model(self, program: Program) -> None:
        """Raise ConfigValueError where the model has parameters, and none of those that the file decides on."""
        decided = list(dict.fromkeys(name for each in self.axes.values() for name in each.parameters))
        if decided and program.params and not any(name in program.params for name in decided):
            names = ", ".join(decided[:_SHOWN]) + (", ..." if len(decided) > _SHOWN else "")
            raise ConfigValueError(
                f"strategy_ckpt_load_file is of another model: this one has none of its parameters ({names}), but "
                f"{next(iter(program.params))} and so on; search again with strategy_ckpt_save_file"
            )

    def on(self, axis: Axis, program: Program, ops: Container[str] = ()) -> Axis:
        """The axis with what is decided on it of this program, which notes what has no entry here or does not fit.

        ops: the names of ops that the step has had, some of which dividing over other axes may have replaced.
        """
        decided, group = self.axes[axis.group], axis.group
        pins: dict[str, Pin] = {}
        for name, placement in decided.parameters.items():
            param, fixed = program.params.get(name), axis.parameters.get(name)
            if param is None:
                program.note(NOT_APPLIED, name, f"{placement} on {group}: the model has no such parameter")
            elif not divides(param.spec.shape, placement, axis.ways):
                program.note(
                    NOT_APPLIED, name, f"{placement} on {group}: {param.spec} does not divide so by {axis.ways}"
                )
            elif fixed is not None and fixed.placement != placement:
                program.note(
                    NOT_APPLIED, name, f"{placement} on {group}: {fixed.placement} is asked for by {fixed.where}"
                )
            else:
                pins[name] = Pin(placement, "strategy file")
        names = {info(node).name: None for node in program.graph.nodes}
        states = {name: state for name, state in decided.states.items() if name in names or name in ops}
        if program.training:
            for name in decided.states:
                if name not in states:
                    program.note(NOT_APPLIED, name, f"on {group}: the step has no such op")
            for name in program.params:
                if name not in decided.parameters:
                    program.note(NOT_APPLIED, name, f"on {group}: the file has no entry for it; whole")
        return replace(axis, parameters={**pins, **axis.parameters}, states=states, blocks=decided.blocks)


def tell_differences(program: Program) -> None:
    """Warn of entries that were not applied, or raise ConfigValueError under strategy_ckpt_load_strict."""
    found = [f"{note.subject}: {note.reason}" for note in program.notes if note.topic == NOT_APPLIED]
    if not found:
        return
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    text = f"{'; '.join(found[:_SHOWN])}{more}"
    if program.config.strategy_ckpt_load_strict:
        raise ConfigValueError(
            f"strategy_ckpt_load_file does not fit the step: {text}. Search again with "
            "strategy_ckpt_save_file, or leave strategy_ckpt_load_strict out, which takes what fits"
        )
    log.warning(
        "strategy_ckpt_load_file fits the step in part: %s. explain() lists them, strategy_ckpt_load_strict=True makes "
        "them an error, and a new search with strategy_ckpt_save_file decides on all of the step",
        text,
    )


def _of_state(state: State) -> str:
    inputs, outputs = (", ".join(map(str, each)) for each in (state.inputs, state.outputs))
    return f"{inputs} -> {outputs}" if inputs else f"-> {outputs}"


def _by_axis(text: object, axes: Mapping[str, object], where: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in check_text(text, where).split("; "):
        axis, mark, rest = part.partition(": ")
        if not mark or axis not in axes:
            raise ConfigValueError(
                f'{where} has {show(part)}; give "<axis>: <placements>" of {", ".join(axes) or "an axis in blocks"}'
            )
        if any(axis == known for known, _ in found):
            raise ConfigValueError(f"{where} has axis {axis} twice; keep one of them")
        found.append((axis, rest))
    return found


def _state(text: str, where: str) -> State:
    inputs, mark, outputs = text.rpartition("-> ")
    if not mark:
        raise ConfigValueError(f'{where} has {show(text)}; give inputs, "->" and results, as in "S(0), R -> S(0)"')
    given = inputs.strip()
    return State(
        tuple(_placement(each, where) for each in outputs.split(", ")),
        tuple(_placement(each, where) for each in given.split(", ")) if given else (),
    )


def _placement(text: str, where: str) -> Placement:
    if text == "P":
        return P
    if not _WRITTEN.fullmatch(text):
        raise ConfigValueError(
            f'{where} has {show(text)}; give "R" (whole), "S(dim)" or "S(dim;blocks)" (a part along a dimension), or '
            '"P" (a summand) in an op'
        )
    return parse_placement(text, where)


def _numbers(value: object, where: str) -> dict[str, float]:
    found = check_object(value, where)
    for name, each in found.items():
        if not isinstance(each, (bool, int, float)):
            raise ConfigValueError(f"{where}[{show(name)}] is {show(each)}; give a number, or true or false")
    return dict(found)


def _counts(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ConfigValueError(f"{where} is {show(value)}; give a list of numbers, such as [1]")
    return [check_int(each, f"{where}[{number}]", 1, 1 << 20) for number, each in enumerate(value)]
