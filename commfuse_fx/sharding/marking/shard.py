"""`cf.shard` gives modules, parameters, functions and tensors a layout, and the compiler completes the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.sharding.marking.check_shape import check_shape
from commfuse_fx.sharding.marking.marks import ModuleMark, ParameterMark, add_mark, add_module_mark
from commfuse_fx.sharding.marking.paths import find_modules, find_parameters, nothing_matches
from commfuse_fx.sharding.marking.plans import Layouts
from commfuse_fx.sharding.marking.strategy import TensorStrategy, on_axis, parse_tensor, parse_tensors
from commfuse_fx.sharding.marking.torch_plans import expand_style, is_style
from commfuse_fx.sharding.marking.traced_marks import MarkedFunction, marked_tensor, name_of, tracing_marks
from commfuse_fx.support.checks import check_bool, show
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.support.user_lines import user_line


@user_frames_only
def shard(
    target: Any,
    *args: Any,
    in_strategy: Any = None,
    out_strategy: Any = None,
    plan: Any = None,
    axis: str | None = None,
    cross_batch: bool = False,
    **parameters: Any,
) -> Any:
    """Give a module, parameter, function or tensor a layout; `parallel_mode="semi_auto"` completes the rest.

    A strategy says how one tensor is divided. Any of these will do, here for a [rows, columns] tensor on mesh=(2, 4),
    whose axes are "dp" and "tp":

        (2, 1)                      # slices per dimension: rows in 2, columns whole
        ("dp", None)                # mesh axes per dimension; (("dp", "tp"), None) divides the rows by both
        [Shard(0), Replicate()]     # a torch.distributed.tensor placement per mesh axis; None leaves that axis open
        {"tp": "S(1)"}              # placements by axis, all others left open; "S(1;3)": dimension 1 is 3 blocks

    A module: one strategy per input of forward (None: not marked), and one for each result. Where there is only one,
    it need not be in a tuple. Parameters are marked by their name in the module. The module itself is returned:

        cf.shard(model.fc, in_strategy=((2, 1),), out_strategy=((2, 4),), weight=(4, 1), bias=(4,))

    Many modules or parameters, by path: `*` stands for part of one component, `**` for any number of components:

        cf.shard(model, "transformer.h.*.mlp.c_fc", weight=(None, "tp"), bias=("tp",))
        cf.shard(model, "**.c_attn.weight", (None, "tp"))

    A parameter is marked in place and returned:

        cf.shard(model.head.weight, ("tp", None))

    A function: one strategy per tensor argument. Returns the marked function, to be called in forward:

        y = cf.shard(torch.matmul, in_strategy=((2, 1), (1, 4)))(x, w)
        y = cf.shard(torch.mul, ((8, 1), (8, 1)))(x, w)

    A tensor, inside forward; returns the marked tensor:

        hidden = cf.shard(hidden, ("dp", None, "tp"))

    A plan: path pattern -> strategy of a parameter, `cf.plans.Layouts` of a module, or a style of
    torch.distributed.tensor.parallel, for which `axis` names the mesh axis (the last one, if not given):

        cf.shard(model, cf.plans.tensor_parallel(model, axis="tp"))
        cf.shard(model, {"**.up": ColwiseParallel(), "**.down": RowwiseParallel()}, axis="tp")

    A module or a function that combines samples of the batch, such as BatchNorm or a loss, as each rank would compute
    it in data parallel, with its own part of the batch instead of the global one:

        cf.shard(model, "**.bn*", cross_batch=True)
        loss_fn = cf.shard(F.cross_entropy, cross_batch=True)

    Outside of a compiled step marked modules, functions and tensors behave as if they were not marked. A mark on a
    parameter itself is an attribute of it, which `copy.deepcopy(model)` drops: mark the copy again.

    Slices of one call take the axes of the mesh in the order of its dimensions: in ((2, 1), (1, 4)) of a matmul on
    mesh=(2, 4) the rows of x are divided by "dp" and the columns of w by "tp"; on mesh=(8,), "dp" is split into "dp.0"
    and "dp.1". What a call returns may be divided by the axes that its contraction leaves. A marked activation and its
    gradient get the same layout.

    Raises ConfigTypeError (a target or strategy of the wrong type, a count that is no int) or ConfigValueError (a
    pattern that matches nothing, a parameter that the module does not have, a strategy that does not fit the shape of
    a parameter). What depends on the mesh or on the shapes of activations is checked when the step is compiled: names
    of axes, whether the product of slices divides the world, and two layouts for one parameter.
    """
    # Places stand in graphs and dumps, which are the same wherever the project lies: no folders.
    place = os.path.basename(user_line(sys._getframe(1))) or "an interactive line"
    check_bool(cross_batch, f"{place}: cross_batch")
    given = _Arguments(args, in_strategy, out_strategy, plan, axis, cross_batch, parameters, place)
    if isinstance(target, nn.Module):
        return _shard_modules(target, given)
    given.refuse_for_others(target)
    if isinstance(target, torch.Tensor):
        given.refuse_cross_batch("a tensor")
        strategy = parse_tensor(given.only_strategy("a tensor"), f"{place}: the strategy of a tensor")
        if isinstance(target, nn.Parameter) and not tracing_marks():
            check_shape(strategy, target.shape, f"{place}: the strategy of a parameter")
            add_mark(target, ParameterMark(strategy, place))
            return target
        return marked_tensor(target, strategy, place)
    if callable(target):
        inputs, outputs = given.in_and_out(f"{place}: ", name_of(target))
        return MarkedFunction(target, inputs, outputs, place, cross_batch)
    hint = "; give the model first: cf.shard(model, pattern, ...)" if isinstance(target, str) else ""
    raise ConfigTypeError(f"{place}: target is {show(target)}, which is no module, parameter, function or tensor{hint}")


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `shard` but the target."""

    args: tuple[Any, ...]
    in_strategy: Any
    out_strategy: Any
    plan: Any
    axis: str | None
    cross_batch: bool
    parameters: Mapping[str, Any]
    place: str

    def refuse_for_others(self, target: Any) -> None:
        """Raises ConfigTypeError if an argument is given that only modules take."""
        for name, value in (("plan", self.plan), ("axis", self.axis), *self.parameters.items()):
            if value is not None:
                raise ConfigTypeError(
                    f"{self.place}: {name} is {show(value)}, but target is {show(target)}; give a module"
                )

    def refuse_cross_batch(self, target: str) -> None:
        """Raises ConfigValueError if cross_batch is given for what computes nothing."""
        if self.cross_batch:
            raise ConfigValueError(
                f"{self.place}: cross_batch=True for {target}, which computes nothing: give the module or function "
                "that combines samples of the batch, such as BatchNorm or the loss"
            )

    def only_strategy(self, subject: str) -> Any:
        """The one strategy of a tensor, given by position or as in_strategy."""
        given = [*self.args, *(value for value in (self.in_strategy, self.out_strategy) if value is not None)]
        if len(given) != 1:
            raise ConfigTypeError(
                f"{self.place}: {subject} takes one strategy, not {len(given)}; write cf.shard(x, (2, 1)) or "
                'cf.shard(x, ("dp", None))'
            )
        return given[0]

    def in_and_out(
        self, prefix: str, subject: str
    ) -> tuple[tuple[TensorStrategy | None, ...], tuple[TensorStrategy | None, ...]]:
        """in_strategy and out_strategy, given by name or by position."""
        named = {"in_strategy": self.in_strategy, "out_strategy": self.out_strategy}
        if len(self.args) > len(named):
            raise ConfigTypeError(
                f"{prefix}{subject} is given {len(self.args)} strategies by position; give in_strategy and "
                "out_strategy, each with one entry per tensor"
            )
        for name, value in zip(named, self.args, strict=False):
            if named[name] is not None:
                raise ConfigTypeError(
                    f"{prefix}{name} of {subject} is given twice, by position and by name; give it once"
                )
            named[name] = value
        inputs, outputs = (parse_tensors(value, f"{prefix}{name} of {subject}") for name, value in named.items())
        if not (any(inputs) or any(outputs) or self.parameters or self.cross_batch):
            raise ConfigTypeError(
                f"{prefix}{subject} is given no strategy; give in_strategy=, out_strategy= or both, or cross_batch=True"
            )
        return inputs, outputs


def _shard_modules(model: nn.Module, given: _Arguments) -> nn.Module:
    plan, args = given.plan, given.args
    if args and plan is None and (isinstance(args[0], (Mapping, Layouts)) or is_style(args[0])):
        plan, args = args[0], args[1:]
    if plan is not None:
        if given.cross_batch:
            raise ConfigTypeError(
                f"{given.place}: a plan is given together with cross_batch; write it in the plan, as in "
                "{'**.bn': cf.plans.Layouts(cross_batch=True)}"
            )
        if args or given.parameters or given.in_strategy is not None or given.out_strategy is not None:
            raise ConfigTypeError(f"{given.place}: a plan is given together with strategies; give them in the plan")
        _apply_plan(model, plan, given.axis, given.place)
        return model
    if given.axis is not None:
        raise ConfigTypeError(f"{given.place}: axis is {show(given.axis)}, but no plan is given for it; leave it out")
    if not (args and isinstance(args[0], str)):
        _mark_module(model, "", given, f"{given.place}: ")
        return model
    pattern, rest = args[0], replace(given, args=args[1:])
    modules = find_modules(model, pattern)
    parameters = {} if modules else find_parameters(model, pattern)
    if not modules and not parameters:
        raise nothing_matches(model, pattern, given.place)
    for path, module in modules.items():
        _mark_module(module, path, rest, f"{given.place}: ")
    if parameters:
        _mark_parameters(model, parameters, rest)
    return model


def _mark_module(module: nn.Module, path: str, given: _Arguments, prefix: str) -> None:
    inputs, outputs = given.in_and_out(prefix, path or type(module).__name__)
    numbered: tuple[tuple[int | str, TensorStrategy], ...] = tuple(
        (position, strategy) for position, strategy in enumerate(inputs) if strategy is not None
    )
    named = tuple((name, parse_tensor(value, f"{prefix}{name}")) for name, value in given.parameters.items())
    add_module_mark(module, path, ModuleMark(numbered, outputs, named, True, given.place, given.cross_batch))


def _mark_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter], given: _Arguments) -> None:
    if given.parameters or given.out_strategy is not None:
        name = next(iter(given.parameters), "out_strategy")
        raise ConfigTypeError(
            f"{given.place}: {name} is given for parameter {next(iter(parameters))}; a pattern that names parameters "
            "takes one strategy"
        )
    given.refuse_cross_batch(f"parameter {next(iter(parameters))}")
    value = given.only_strategy("a pattern that names parameters")
    strategy = parse_tensor(value, f"{given.place}: the strategy of parameters")
    for name in parameters:
        owner, _, own = name.rpartition(".")
        mark = ModuleMark((), (), ((own, strategy),), True, given.place)
        add_module_mark(model.get_submodule(owner), owner, mark)


def _apply_plan(model: nn.Module, plan: Any, axis: str | None, place: str) -> None:
    if axis is not None and not isinstance(axis, str):
        raise ConfigTypeError(f"{place}: axis is {show(axis)}; give the name of a mesh axis")
    if not isinstance(plan, Mapping):
        plan = {"": plan}
    for pattern, entry in plan.items():
        if not isinstance(pattern, str):
            raise ConfigTypeError(f"{place}: plan has the key {show(pattern)}; give path patterns as keys")
        modules = {"": model} if pattern == "" else find_modules(model, pattern)
        parameters = {} if modules else find_parameters(model, pattern)
        if not modules and not parameters:
            raise nothing_matches(model, pattern, place)
        for path, module in modules.items():
            for layouts in _layouts_of(entry, module, path, pattern, place):
                add_module_mark(module, path, _mark_of(layouts, path, axis, place))
        if parameters:
            if isinstance(entry, (Layouts, list)) or is_style(entry):
                raise ConfigTypeError(
                    f"{place}: plan[{pattern!r}] is {show(entry)}, but the pattern names parameters; give a strategy"
                )
            strategy = on_axis(parse_tensor(entry, f"{place}: plan[{pattern!r}]"), axis)
            _mark_parameters(model, parameters, _Arguments((strategy,), None, None, None, None, False, {}, place))


def _layouts_of(entry: Any, module: nn.Module, path: str, pattern: str, place: str) -> list[Layouts]:
    """The layouts of one entry of a plan, for one module. An entry is a layout, a style or a list of both."""
    entries = entry if isinstance(entry, list) else [entry]
    found: list[Layouts] = []
    for each in entries:
        if isinstance(each, Layouts):
            found.append(each)
        elif is_style(each):
            found.extend(expand_style(each, module, path, place))
        else:
            raise ConfigTypeError(
                f"{place}: plan[{pattern!r}] is {show(each)}, but the pattern names modules; give "
                "cf.plans.Layouts(...) or a style of torch.distributed.tensor.parallel"
            )
    return found


def _mark_of(layouts: Layouts, path: str, axis: str | None, place: str) -> ModuleMark:
    prefix = f"{place}: "

    def one(value: Any, name: str) -> TensorStrategy:
        return on_axis(parse_tensor(value, f"{prefix}{name}"), axis)

    def several(value: Any, name: str) -> list[TensorStrategy | None]:
        found = parse_tensors(value, f"{prefix}{name} of {path}")
        return [None if strategy is None else on_axis(strategy, axis) for strategy in found]

    inputs: list[tuple[int | str, TensorStrategy]] = [
        (position, strategy)
        for position, strategy in enumerate(several(layouts.in_strategy, "in_strategy"))
        if strategy is not None
    ]
    inputs.extend((name, one(value, name)) for name, value in layouts.keywords.items())
    outputs = tuple(several(layouts.out_strategy, "out_strategy"))
    named = tuple((name, one(value, name)) for name, value in layouts.parameters.items())
    on_parts = check_bool(layouts.cross_batch, f"{prefix}cross_batch of {path}")
    return ModuleMark(tuple(inputs), outputs, named, layouts.gradient, place, on_parts)
