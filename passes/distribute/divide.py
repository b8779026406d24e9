"""Divide the step among the ranks of the mesh: from one device's graph to the one that every rank runs.

Why: docs/decisions.md, "One mesh axis after the other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from math import prod
from typing import Any

import torch

from commfuse_fx.errors import CommFuseError, ConfigValueError
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.ir.core.placement import Placement, R, S, Shard, divides
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ops import COLLECTIVES
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Scalar, Situation, Variant, Variants
from commfuse_fx.sharding import rules as _rules  # noqa: F401  # registers them
from commfuse_fx.sharding.dividing.axis import PROPAGATED, Axis, Pin
from commfuse_fx.sharding.dividing.check_part_calls import check_part_calls
from commfuse_fx.sharding.dividing.decisions import Decisions
from commfuse_fx.sharding.dividing.division import Division
from commfuse_fx.sharding.dividing.fit_marks import refine
from commfuse_fx.sharding.dividing.gradient_precision import in_own_precision
from commfuse_fx.sharding.dividing.localize import LocalSpecs
from commfuse_fx.sharding.dividing.module_results import ModuleResults
from commfuse_fx.sharding.dividing.parts_of_sums import sum_parts
from commfuse_fx.sharding.dividing.resolve import Resolved, resolve_marks
from commfuse_fx.sharding.dividing.strategies import NOT_APPLIED, Strategies, tell_differences
from commfuse_fx.sharding.marking.blocks import sections
from commfuse_fx.sharding.marking.layout_op import erase_marks
from commfuse_fx.sharding.marking.marks import Marks
from commfuse_fx.sharding.marking.part_ops import erase_parts
from commfuse_fx.sharding.search.grids import grids
from commfuse_fx.support.checks import rows_that_divide


@dataclass(frozen=True)
class Divide(PricedPass):
    """One mesh axis after the other, those over which the batch is divided first.

    The program's marks say what the user asks for, its layouts what an earlier graph of the same step has decided.
    local_inputs: every rank is handed its part of the batch, not the whole.
    local_parameters: every rank keeps its part of a parameter.
    searched: strategies are searched for the least predicted time of a step. Else only the batch is divided, and what
        marks say.
    exposed: how much of the time of collectives counts in a search, as `Exposure` writes it; "": all.
    saving: bytes that the strategies are to take less than the fastest ones, as far as that goes.
    split: sizes of axes that the ranks become, as "64x8", so that neighbours may divide other things than nodes do; "":
        they stay as the mesh is.
    quick: the search is content with what it finds first, also where it is far from proven to be the cheapest.
    inner: over the first mesh axis the batch alone is divided, and strategies are searched on the others.
    level: of the parallel optimizer, which the search has chosen as a part of the strategy; 0: it is off. None: it is
        as the user has said.
    """

    name = "divide"
    numerics = "defines"
    requires = ("simplified",)
    ensures = ("divided",)

    always_offers = True

    local_inputs: bool = True
    local_parameters: bool = False
    searched: bool = False
    exposed: str = ""
    saving: int = 0
    split: str = ""
    quick: bool = False
    inner: bool = False
    level: int | None = None

    @classmethod
    def when(cls, situation: Situation) -> Divide | None:
        if not situation.divides:
            return None
        return cls(
            local_inputs=not situation.config.full_batch,
            local_parameters=situation.local_parameters,
            searched=bool(situation.variant.get("searched", situation.searches)),
            exposed=str(situation.variant.get("exposed", "")),
            saving=int(situation.variant.get("saving", 0)),
            split=str(situation.variant.get("split", "")),
            quick=bool(situation.variant.get("quick", False)),
            inner=bool(situation.variant.get("inner", False)),
            level=situation.variant.get("level", None),
        )

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        if not situation.searches:
            return found
        if program.strategies is not None:
            given: Strategies = program.strategies
            found = _as_chosen(situation, program, found, given.plan)
            choices: dict[str, Scalar] = {"searched": bool(given.axes)}
            if situation.config.says_nothing_of_levels and given.level is not None:
                choices["level"] = given.level
            searched, fixed = ([each.but(**choices) for each in part] for part in (found.searched, found.fixed))
            return Variants(tuple(searched), tuple(fixed))
        if program.layouts is not None:  # parameters lie already, and what else is divided is left to choose
            if situation.config.memory_limit is None:
                return found
            first, *others = found.searched
            both = (first, first.but(searched=False))
            levels = [each.but(level=level) for level in situation.free_levels(program) for each in both]
            return replace(found, searched=(*both, *levels, *others))
        if situation.config.propagates:
            return found
        first, *others = found.searched
        splits = _free_grids(situation, program)
        split = [first.but(split="x".join(map(str, sizes)), quick=True) for sizes in splits]
        has_inner = sum(size > 1 for size in program.mesh.shape) > 1
        inner = [each.but(inner=True) for each in ([first] if has_inner else split)]
        return replace(found, searched=(first, *split, *inner, first.but(searched=False), *others))

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        _refuse_user_collectives(program)
        if self.level is not None:
            program.config = program.config.with_level(self.level)
        if not isinstance(program.marks, Marks):
            raise ConfigValueError(
                "pass divide needs the marks of the model, which only the captured.json of a dump has; give that file"
            )
        resolved = resolve_marks(program.marks, program)
        given: Strategies | None = program.strategies
        if given is not None:
            given.check_mesh(resolved.mesh)
            given.check_model(program)
            resolved = _split(resolved, tuple(given.mesh.values()))
        elif self.split:
            resolved = _split(resolved, tuple(int(size) for size in self.split.split("x")))
        program.mesh = resolved.mesh
        erase_marks(program, resolved.parameter_nodes)
        program.batch_axes = ",".join(resolved.data_axes)
        check_part_calls(program)
        for node in program.graph.nodes:
            info(node).varies = ""
        ops = {info(node).name: node.target for node in program.graph.nodes}
        gradients = {name: info(grad).name for name, grad in program.grads.items()}
        specs = context.known(LocalSpecs)
        axes = self._axes(program, resolved, given)
        data = [axis for axis in axes if axis.is_data]
        rest = [axis for axis in axes if not axis.is_data]
        is_searched = self.searched and given is None
        results = ModuleResults(program)
        decided: dict[str, Decisions] = {}
        if is_searched and not rest:
            program.note("search", "the whole step", _why_nothing(program))
        for number, axis in enumerate(axes):
            if is_searched and number == len(data):
                rest = self._searched(program, rest, context)
            axis = axis if axis.is_data else rest[number - len(data)]
            if given is not None and axis.group in given.axes:
                axis = given.on(axis, program, ops)
            division = Division(program, axis, specs, [*data, *rest][number + 1 :])
            division.run()
            results.add(division)
            if axis.states:
                pins = {name: pin.placement for name, pin in axis.parameters.items()}
                taken = {info(node).name: state for node, state in division.not_taken.items() if given is None}
                decided[axis.group] = Decisions(pins, {**axis.states, **taken}, axis.blocks)
            if given is not None:
                for node in division.not_taken:
                    name = info(node).name
                    if ops.get(name, node.target) != node.target:  # what dividing over other axes has made of an op
                        continue
                    program.note(NOT_APPLIED, name, f"on {axis.group}: the op cannot have this strategy")
        if given is not None:
            tell_differences(program)
        if program.config.parallel_mode == "auto":
            mesh = program.mesh
            sizes = dict(zip(mesh.names, mesh.shape, strict=True))
            program.strategies = Strategies(mesh=sizes, axes=decided, level=self.level)
        results.finish(program)
        in_own_precision(program, gradients)
        sum_parts(program)
        erase_marks(program)
        erase_parts(program)
        program.set_output()
        return bool(axes)

    def _searched(self, program: Program, axes: Sequence[Axis], context: PassContext) -> list[Axis]:
        """The axes with what a search finds. Only a search needs NumPy, which may not be installed."""
        try:
            search = import_module("commfuse_fx.sharding.search.searched")
        except ImportError as error:
            raise CommFuseError(
                "parallel_mode='auto' needs NumPy: install it, as by pip install 'commfuse-fx[auto]', or pass "
                "parallel_mode='semi_auto', which completes what cf.shard marks"
            ) from error
        known = context.known(search.KnownLayouts)
        proofs = None if context.kept is None else context.kept.get(search.SearchProofs)
        found: list[Axis] = search.searched(
            program, axes, context.costs, self.exposed, self.saving, known, self.quick, proofs
        )
        return found

    def _axes(self, program: Program, resolved: Resolved, given: Strategies | None) -> list[Axis]:
        """Axes on which everything is marked alike count as one. given: strategies from a file."""
        mesh, data = resolved.mesh, resolved.data_axes
        is_searched = program.config.parallel_mode == "auto"
        is_fixed: Sequence[str] = data if program.config.propagates else ()
        if given is not None and given.axes:
            is_fixed = [name for name in data if name not in given.axes]
        elif self.inner:
            is_fixed = [name for name in mesh.names if mesh.size(name) > 1][:1]
        marks = {info(node).name: layout for node, layout in resolved.activations.items()}
        pins = {name: pin.layout for name, pin in resolved.parameters.items()}
        order = [name for name in mesh.names if name in data] + [name for name in mesh.names if name not in data]
        classes: list[tuple[Any, list[str]]] = []
        for axis in order:
            if mesh.size(axis) == 1:
                continue
            key = (
                axis if is_searched and axis not in is_fixed else "",
                axis in data,
                tuple((name, layout.get(axis)) for name, layout in pins.items()),
                tuple((name, layout.get(axis)) for name, layout in marks.items()),
            )
            if classes and classes[-1][0] == key:
                classes[-1][1].append(axis)
            else:
                classes.append((key, [axis]))
        return [self._axis(program, resolved, names, names[0] in is_fixed) for _, names in classes]

    def _axis(self, program: Program, resolved: Resolved, names: Sequence[str], is_fixed: bool) -> Axis:
        group = ",".join(names)
        ways = prod(resolved.mesh.size(name) for name in names)
        first = names[0]
        is_data = first in resolved.data_axes
        return Axis(
            group,
            ways,
            parameters=self._parameters(program, resolved, group, first, ways),
            inputs=self._inputs(program, group, resolved) if is_data else {},
            activations={
                info(node).name: Pin(placement, "mark")
                for node, layout in resolved.activations.items()
                if (placement := layout.get(first)) is not None
            },
            local_inputs=self.local_inputs,
            local_parameters=self.local_parameters,
            is_data=is_data and (not self.searched or is_fixed),
        )

    def _inputs(self, program: Program, group: str, resolved: Resolved) -> dict[str, Placement]:
        total = prod(resolved.mesh.size(axis) for axis in resolved.data_axes)
        for path in program.batch_inputs:
            node = program.placeholder("input", path)
            if node is not None and tensor_spec(node).shape[0] % total:
                rows = tensor_spec(node).shape[0]
                raise ConfigValueError(
                    f"the global batch of {rows} ({path}) does not divide by the {total} ranks of {group}; "
                    f"{rows_that_divide(rows, total)}"
                )
        return dict.fromkeys(program.batch_inputs, S(0))

    def _parameters(self, program: Program, resolved: Resolved, group: str, first: str, ways: int) -> dict[str, Pin]:
        if program.layouts is not None:
            known = {name: dict(layout).get(group) for name, layout in program.layouts.items()}
            places = {name: pin.place for name, pin in resolved.parameters.items()}
            return {
                name: Pin(R if placement is None else placement, places.get(name, PROPAGATED))
                for name, placement in known.items()
            }
        found: dict[str, Pin] = {}
        for name, pin in resolved.parameters.items():
            placement = pin.layout.get(first)
            if placement is not None:
                found[name] = Pin(self._with_blocks(program, name, placement, ways), pin.place)
        return found

    def _with_blocks(self, program: Program, name: str, placement: Placement, ways: int) -> Placement:
        node = program.placeholder("parameter", name)
        if not isinstance(placement, Shard) or node is None:
            return placement
        inside = Shard(placement.dim, sections(node, placement.dim))
        return inside if divides(tensor_spec(node).shape, inside, ways) else placement


def _why_nothing(program: Program) -> str:
    """Why a search has nothing to decide."""
    if program.mesh.world == 1:
        return "nothing is searched, as there is one device"
    return "nothing is searched, as no mark divides the model over a mesh axis: all axes divide the batch"


def _split(resolved: Resolved, sizes: tuple[int, ...]) -> Resolved:
    """The same with a single axis that is split into axes of these sizes."""
    if len(resolved.mesh.names) == len(sizes):
        return resolved
    mesh = refine(resolved.mesh, {resolved.mesh.names[0]: sizes})
    return replace(resolved, mesh=mesh, data_axes=mesh.names)


def note_plan(program: Program, variant: Variant) -> None:
    """Keep with the strategies what else was chosen, where plans of buckets and of their order were compared."""
    if program.strategies is not None and program.config.comm_fusion.is_optimal:
        own = {field.name for field in fields(Divide)}
        plan = {name: value for name, value in variant.choices if name not in own}
        program.strategies = replace(program.strategies, plan=plan)


def _as_chosen(situation: Situation, program: Program, found: Variants, plan: Mapping[str, float] | None) -> Variants:
    """The variant that strategies were found with. plan: what was chosen of it; None: all variants are compared.

    Where no variant has these choices, the first one is taken, and a note says so.
    """
    if plan is None:
        return found
    chosen = [each for each in (*found.searched, *found.fixed) if dict(each.choices) == dict(plan)]
    if not chosen and situation.by_cost:
        text = ", ".join(f"{name}={value}" for name, value in plan.items())
        program.note(NOT_APPLIED, "plan", f"{text}: plans with these options are not compared for this step")
    return Variants((chosen[0] if chosen else found.searched[0],))


def _free_grids(situation: Situation, program: Program) -> list[tuple[int, int]]:
    """What the ranks can be where nothing that the user has said depends on the axes of the mesh."""
    marks = program.marks
    is_free = situation.config.mesh is None and len(program.mesh.names) == 1
    has_layouts = any(each.mark.has_layouts for each in marks.modules) or bool(marks.parameters)
    if not is_free or has_layouts:
        return []
    return grids(program.mesh.world, _neighbours(PassContext.of(situation.config)))


def _neighbours(context: PassContext) -> int:
    """How many neighbouring ranks the innermost level of the network joins; 1 where that differs or is not known."""
    domains = 1 if context.prices is None else context.prices.cluster.levels[0].domains
    return domains if isinstance(domains, int) else 1


def _refuse_user_collectives(program: Program) -> None:
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in COLLECTIVES:
            details = info(node)
            raise ConfigValueError(
                f"the model calls cf.ops.{op_label(node.target)} in {details.module or 'its forward'} "
                f'({details.source}), but a divided step (parallel_mode="semi_auto" or "auto") is written for one '
                "device, and the compiler puts in the collectives: remove the call, or use "
                'parallel_mode="data_parallel"'
            )
