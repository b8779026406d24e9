"""Turn styles of torch.distributed.tensor.parallel into marks: the same layouts without process groups or DTensors.

A style may give the present and the desired layout of an input. They become two marks, one after the other. A mark for
a whole input or result holds in the forward only, so that its gradient may stay a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.ir.core.placement import Placement, R, Replicate, S, Shard
from commfuse_fx.sharding.marking.logical import kind_of_module
from commfuse_fx.sharding.marking.plans import Layouts
from commfuse_fx.sharding.marking.strategy import Placements, is_placement, parse_placement

_STYLES = "torch.distributed.tensor.parallel"
_LAST_AXIS = -1


def is_style(value: Any) -> bool:
    """Whether `value` is a parallel style of torch."""
    return any(base.__name__ == "ParallelStyle" and base.__module__.startswith(_STYLES) for base in type(value).__mro__)


def expand_style(style: Any, module: nn.Module, path: str, place: str) -> list[Layouts]:
    """The layouts of a style for one module, over the last axis of the mesh, in the order in which they are applied.

    Raises ConfigTypeError for an unknown style, or for a module that the style does not fit.
    """
    from torch.distributed.tensor import parallel  # slow to import, and loaded already if there is a style

    where = f"{place}: {type(style).__name__} of module {path or type(module).__name__}"
    if isinstance(style, (parallel.ColwiseParallel, parallel.RowwiseParallel)):
        by_column = isinstance(style, parallel.ColwiseParallel)
        return _linear(style, module, by_column, where)
    if isinstance(style, parallel.SequenceParallel):
        divided = parse_placement(style.sequence_sharding[0], where)
        parameters = {name: _on(R) for name, _ in module.named_parameters()}
        return [Layouts(in_strategy=(_on(divided),), out_strategy=(_on(divided),), parameters=parameters)]
    if isinstance(style, parallel.PrepareModuleInput):
        return _inputs(style, where)
    if isinstance(style, parallel.PrepareModuleOutput):
        return _outputs(style.output_layouts, style.desired_output_layouts, where)
    if isinstance(style, parallel.PrepareModuleInputOutput):
        out = style.prepare_module_output
        return [
            *_inputs(style.prepare_module_input, where),
            *_outputs(out.output_layouts, out.desired_output_layouts, where),
        ]
    raise ConfigTypeError(
        f"{where} is not known; use ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, "
        "PrepareModuleOutput, PrepareModuleInputOutput or cf.plans.Layouts"
    )


def _linear(style: Any, module: nn.Module, by_column: bool, where: str) -> list[Layouts]:
    kind = kind_of_module(module)
    if kind not in ("linear", "conv1d", "embedding"):
        raise ConfigTypeError(
            f"{where}: the module is a {type(module).__name__}; this style is for nn.Linear and nn.Embedding, for "
            "others give cf.plans.Layouts(in_strategy=..., out_strategy=..., parameters={...})"
        )
    output_dim = 0 if kind == "linear" else 1  # of the weight
    parameters = {"weight": _on(S(output_dim if by_column else 1 - output_dim))}
    if getattr(module, "bias", None) is not None:
        parameters["bias"] = _on(S(0) if by_column else R)
    wanted: Placement = R if by_column or kind == "embedding" else S(-1)
    given = style.input_layouts[0]
    if kind == "embedding" and not by_column:
        given = None  # by default the style says that the input is divided, which is not meant for indices
    inputs = _step_by_step([given], [wanted], where)
    return [
        Layouts(parameters=parameters),
        *(Layouts(in_strategy=tuple(entries), gradient=gradient) for entries, gradient in inputs),
        *_outputs((None,), style.output_layouts, where),
    ]


def _inputs(style: Any, where: str) -> list[Layouts]:
    found: list[Layouts] = []
    if style.input_layouts is not None:
        steps = _step_by_step(style.input_layouts, style.desired_input_layouts, where)
        found.extend(Layouts(in_strategy=tuple(entries), gradient=gradient) for entries, gradient in steps)
    for name, given in style.input_kwarg_layouts.items():
        steps = _step_by_step([given], [style.desired_input_kwarg_layouts.get(name)], where)
        found.extend(Layouts(keywords={name: entries[0]}, gradient=gradient) for entries, gradient in steps)
    return found


def _outputs(given: Sequence[Any], desired: Sequence[Any], where: str) -> list[Layouts]:
    steps = _step_by_step(given, desired, where)
    return [Layouts(out_strategy=tuple(entries), gradient=gradient) for entries, gradient in steps]


def _step_by_step(
    given: Sequence[Any], desired: Sequence[Any], where: str
) -> list[tuple[list[Placements | None], bool]]:
    """The marks for tensors with these present and desired layouts, in order.

    Each item is a list of placements, one per tensor, and whether gradients get them too.
    """
    first: list[Placement | None] = []
    whole: list[Placement | None] = []
    divided: list[Placement | None] = []
    for is_, to_be in zip(given, desired, strict=True):
        start = None if is_ is None or _is_partial(is_) else parse_placement(is_, where)
        end = None if to_be is None else parse_placement(to_be, where)
        if start is not None and end is None:
            end = start  # given, and not to be changed
        first.append(start if isinstance(start, Shard) and start != end else None)
        whole.append(end if isinstance(end, Replicate) else None)
        divided.append(end if isinstance(end, Shard) else None)
    steps = [(first, True), (whole, False), (divided, True)]
    return [([None if p is None else _on(p) for p in entries], gradient) for entries, gradient in steps if any(entries)]


def _is_partial(value: Any) -> bool:
    return is_placement(value) and not isinstance(value, (Replicate, Shard)) and bool(value.is_partial())


def _on(placement: Placement) -> Placements:
    return Placements(((_LAST_AXIS, placement),))
