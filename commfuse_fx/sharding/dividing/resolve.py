"""Resolve the marks of a model and of its traced step to layouts on the mesh.

Why: docs/decisions.md, "The batch is divided over the axes that divide nothing else".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.placement import Placement, Shard
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.fit_marks import MarkedCall, MarkedTensor, resolve
from commfuse_fx.sharding.marking.layout_op import NodeMark, is_mark, mark_of
from commfuse_fx.sharding.marking.logical import logical_dims
from commfuse_fx.sharding.marking.marks import MarkedModule, Marks
from commfuse_fx.sharding.marking.strategy import Layout

aten = torch.ops.aten


@dataclass(frozen=True)
class ParameterPin:
    """The layout that marks give a parameter. label, place: the first mark that gives it, and its source line."""

    name: str
    layout: Layout
    label: str
    place: str


@dataclass(frozen=True)
class Resolved:
    """All marks of a step as layouts.

    mesh: the mesh of the step, with axes split if marks need parts of them.
    parameters: the layouts of parameters, by name.
    activations: the layouts of mark nodes in the graph, also of those on gradients.
    parameter_nodes: mark nodes on a parameter, on a transpose or cast of one, or on its gradient. `parameters` has all
        that they say.
    data_axes: the axes over which the batch is divided by default: all of them, where strategies are searched for more
        than what marks say.
    """

    mesh: Mesh
    parameters: Mapping[str, ParameterPin]
    activations: Mapping[fx.Node, Layout]
    parameter_nodes: tuple[fx.Node, ...]
    data_axes: tuple[str, ...]


@dataclass(frozen=True)
class _Subject:
    """The tensor to which a member of a call gives a layout.

    It is the parameter with this name, whose dimension dims[i] is the member's dimension i. If the name is "", it is
    the activation at `position` of call `number`.
    """

    parameter: str = ""
    dims: tuple[int | None, ...] = ()
    number: int = -1
    position: str = ""


def resolve_marks(marks: Marks, program: Program) -> Resolved:
    """Fit all marks to the program's mesh, together.

    Raises ConfigValueError, with marks, values and a fix, if a strategy does not fit its tensor or the mesh, or if two
    marks give one parameter, or one input or result of a module, two layouts.
    """
    names = {node: source.name for node, source in program.sources.items() if source.kind == "parameter"}
    nodes = {node: mark_of(node) for node in program.graph.nodes if is_mark(node)}
    calls, subjects = _traced_calls(marks, nodes, names)
    called = {_key(mark): None for mark in nodes.values()}
    for marked in marks.modules:
        if _key_of_module(marked) not in called:
            members, pinned = _parameters_of(marked)
            calls.append(MarkedCall(tuple(members), marked.mark.place))
            subjects.append(pinned)
    for param in marks.parameters:
        dims = logical_dims("broadcast", "in0", len(param.shape))
        label = f"the strategy of parameter {param.name}"
        calls.append(MarkedCall((MarkedTensor(label, param.mark.strategy, param.shape, dims),), param.mark.place))
        subjects.append([_Subject(param.name, tuple(range(len(param.shape))))])
    mesh, layouts = resolve(calls, program.mesh)
    pins: dict[str, ParameterPin] = {}
    by_position: dict[tuple[int, str], Layout] = {}
    pinning: dict[tuple[int, str], None] = {}
    for call, found, about in zip(calls, layouts, subjects, strict=True):
        for member, layout, subject in zip(call.members, found, about, strict=True):
            if subject.parameter:
                own = _of_parameter(layout, subject.dims)
                _pin(pins, ParameterPin(subject.parameter, own, f"{member.label}, {member.strategy}", call.place), mesh)
                pinning[subject.number, subject.position] = None
            else:
                by_position[subject.number, subject.position] = layout
    at = {node: (mark.number, mark.position) for node, mark in nodes.items()}
    activations = {node: by_position[key] for node, key in at.items() if key in by_position}
    _check_modules(nodes, activations)
    on_parameters = tuple(node for node, key in at.items() if key in pinning)
    is_searched = program.config.parallel_mode == "auto" and not program.config.propagates
    data = mesh.names if is_searched else data_axes(pins.values(), activations.values(), mesh)
    return Resolved(mesh, pins, activations, on_parameters, data)


def data_axes(pins: Iterable[ParameterPin], activations: Iterable[Layout], mesh: Mesh) -> tuple[str, ...]:
    """The axes for the batch: no mark divides a parameter by them, nor any dimension of an activation but the first."""
    taken: dict[str, None] = {}
    for pin in pins:
        taken.update({axis: None for axis, _ in pin.layout.divided()})
    for layout in activations:
        taken.update({axis: None for axis, placement in layout.divided() if placement.dim != 0})
    return tuple(axis for axis in mesh.names if axis not in taken)


def parameter_behind(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, tuple[int | None, ...]] | None:
    """The parameter whose elements a node holds, and for each dimension of the node the parameter's (None: of size 1).

    names: the placeholders of parameters. Looks through casts, copies, transposes, views that only add or take
    dimensions of size 1, and marks; None for anything else.
    """
    chain: list[fx.Node] = []
    while node not in names:
        if not (is_mark(node) or node.target in _SAME_ELEMENTS) or not isinstance(node.args[0], fx.Node):
            return None
        chain.append(node)
        node = node.args[0]
    dims: tuple[int | None, ...] = tuple(range(len(tensor_spec(node).shape)))
    for step in reversed(chain):
        taken = _dims_after(step, dims)
        if taken is None:
            return None
        dims = taken
    return names[node], dims


_COPIES = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_SAME_ELEMENTS = (*_COPIES, *_TRANSPOSES, *_RESHAPES)


def _dims_after(step: fx.Node, dims: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """Follow `dims` through one op; None if it merges or splits dimensions."""
    if is_mark(step) or step.target in _COPIES:
        return dims
    ndim = len(dims)
    if step.target is aten.t.default:
        return dims[::-1]
    if step.target is aten.transpose.int:
        first, second = (_int(dim) % ndim for dim in step.args[1:3])
        order = list(range(ndim))
        order[first], order[second] = second, first
        return tuple(dims[i] for i in order)
    if step.target is aten.permute.default:
        given = step.args[1]
        assert isinstance(given, (list, tuple))
        return tuple(dims[_int(dim) % ndim] for dim in given)
    source = step.args[0]
    assert isinstance(source, fx.Node)
    before, after = tensor_spec(source).shape, tensor_spec(step).shape
    kept = [(size, dim) for size, dim in zip(before, dims, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in after if size != 1]:
        return None
    rest = iter(kept)
    return tuple(None if size == 1 else next(rest)[1] for size in after)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _traced_calls(
    marks: Marks, nodes: Mapping[fx.Node, NodeMark], names: Mapping[fx.Node, str]
) -> tuple[list[MarkedCall], list[list[_Subject]]]:
    """The marked calls of the graph, inputs first, then parameters of the module, then results."""
    modules = {_key_of_module(marked): marked for marked in marks.modules}
    grouped: dict[int, list[tuple[fx.Node, NodeMark]]] = {}
    for node, mark in nodes.items():
        if not mark.gradient:
            grouped.setdefault(mark.number, []).append((node, mark))
    calls: list[MarkedCall] = []
    subjects: list[list[_Subject]] = []
    for group in grouped.values():
        first = group[0][1]
        members: list[MarkedTensor] = []
        about: list[_Subject] = []
        for node, mark in sorted(group, key=lambda pair: pair[1].is_output):
            if mark.is_output:
                break
            members.append(_member(node, mark))
            about.append(_subject(node, mark, names))
        module = modules.get(_key(first))
        if module is not None:
            owned, pinned = _parameters_of(module)
            members.extend(owned)
            about.extend(pinned)
        for node, mark in group:
            if mark.is_output:
                members.append(_member(node, mark))
                about.append(_Subject(number=mark.number, position=mark.position))
        calls.append(MarkedCall(tuple(members), first.place))
        subjects.append(about)
    return calls, subjects


def _key(mark: NodeMark) -> tuple[str, int, str, str]:
    """A key that is equal for a mark of a module and for its nodes."""
    return mark.subject, mark.index, mark.place, mark.kind


def _key_of_module(marked: MarkedModule) -> tuple[str, int, str, str]:
    return marked.path, marked.index, marked.mark.place, marked.kind


def _member(node: fx.Node, mark: NodeMark) -> MarkedTensor:
    shape = tensor_spec(node).shape
    dims = logical_dims(mark.kind, mark.position, len(shape))
    subject = mark.subject or "the model"
    if mark.kind == "tensor":
        label = "the strategy of a tensor"
    elif mark.is_output:
        label = f"out_strategy[{mark.position[3:]}] of {subject}"
    else:
        label = f"in_strategy[{mark.position[2:].lstrip(':')}] of {subject}"
    return MarkedTensor(label, mark.strategy, shape, dims, mark.is_output)


def _subject(node: fx.Node, mark: NodeMark, names: Mapping[fx.Node, str]) -> _Subject:
    behind = parameter_behind(node, names)
    if behind is None:
        return _Subject(number=mark.number, position=mark.position)
    return _Subject(behind[0], behind[1], mark.number, mark.position)


def _parameters_of(marked: MarkedModule) -> tuple[list[MarkedTensor], list[_Subject]]:
    members: list[MarkedTensor] = []
    about: list[_Subject] = []
    for (own, strategy), (name, shape) in zip(marked.mark.parameters, marked.parameters, strict=True):
        label = f"{own} of {marked.path or 'the model'}"
        members.append(MarkedTensor(label, strategy, shape, logical_dims(marked.kind, own, len(shape))))
        about.append(_Subject(name, tuple(range(len(shape)))))
    return members, about


def _of_parameter(layout: Layout, dims: tuple[int | None, ...]) -> Layout:
    """The layout of the parameter behind a tensor with this layout."""
    found: list[tuple[str, Placement]] = []
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            dim = dims[placement.dim]
            assert dim is not None, "a dimension of size 1 is divided"
            placement = Shard(dim, placement.blocks)
        found.append((axis, placement))
    return Layout(tuple(found))


def _check_modules(nodes: Mapping[fx.Node, NodeMark], layouts: Mapping[fx.Node, Layout]) -> None:
    """Raise ConfigValueError where two marks of one module speak of one of its inputs or results and disagree. Layouts
    may follow each other in one plan, and where tensors and functions are marked."""
    for node, mark in nodes.items():
        (before,) = node.all_input_nodes
        below = nodes.get(before)
        if below is None or mark.gradient or below.index == mark.index or below.place == mark.place:
            continue
        is_same = (below.subject, below.position) == (mark.subject, mark.position)
        if is_same and before in layouts and node in layouts and not layouts[before].agrees(layouts[node]):
            raise ConfigValueError(
                f"two marks give {_member(node, mark).label} two layouts: {below.strategy} at {below.place} means "
                f"{layouts[before]}, but {mark.strategy} at {mark.place} means {layouts[node]}; give both the same "
                "layout, or remove one"
            )


def _pin(pins: dict[str, ParameterPin], pin: ParameterPin, mesh: Mesh) -> None:
    before = pins.setdefault(pin.name, pin)
    if not before.layout.agrees(pin.layout):
        raise ConfigValueError(
            f"two marks give parameter {pin.name} two layouts: {before.label} at {before.place} means "
            f"{before.layout}, but {pin.label} at {pin.place} means {pin.layout}; "
            "give both the same layout, or remove one"
        )
    pins[pin.name] = ParameterPin(pin.name, before.layout.joined(pin.layout, mesh), before.label, before.place)
