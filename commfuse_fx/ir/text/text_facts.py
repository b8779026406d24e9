"""What a program knows beyond its nodes, as far as canonical text says it; what it does not say is chosen.

Where the inputs come from, parameters, gradients, updates, and what collectives are for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.collectives import WAIT, group_of, is_start, kind_of, root_of
from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Parameter, Program, Source
from commfuse_fx.ir.rows.shard_rows import gives_rows, group_of_rows, name_of_rows, owner_of_rows, parameter_of_rows
from commfuse_fx.ir.text.text_buckets import describe_collectives
from commfuse_fx.ir.text.text_lines import ErrorAt, TextLine
from commfuse_fx.ir.text.text_updates import UpdateReader, flat_members

_PLAIN = ("parameter", "buffer", "input", "seed", "gradient")
_HYPER = "hyper-parameter of the optimizer"
_SHARED = re.compile(r"parameter shared with \[(.+)\]")
_PART = "parameter in a larger storage"
_STATE = re.compile(r"state(?: of \d{1,9} tensor\(s\))?")
_OWNED = re.compile(r"update\.(\d{1,9})\.(.+)")


def fill_in(
    program: Program,
    lines: Mapping[fx.Node, TextLine],
    optimizer: tuple[str, str] | None,
    flags: Mapping[str, bool],
    gradients: Sequence[str] | None,
    error: ErrorAt,
) -> None:
    """Complete a program that has its graph. lines: of its nodes. optimizer: class and rule, of the header.

    Raises what `error` makes.
    """
    flats: dict[fx.Node, tuple[tuple[str, int], ...]] = {}
    for node, line in lines.items():
        if node.op == "placeholder":
            try:
                source = _source(line)
                if source.kind == "flat":
                    flats[node] = flat_members(line.op.removeprefix("flat "))
                    source = Source("flat", flats[node][0][0], source.owner)
            except ValueError as problem:
                raise error(line.number, str(problem)) from None
            program.add_source(node, source)
    _add_params(program, lines)
    last = max((line.number for line in lines.values()), default=0) + 1
    updates = UpdateReader(program, flats)
    try:
        unknown = next((name for each in flats.values() for name, _ in each if name not in program.params), None)
        if unknown is not None:
            raise ValueError(f"flat storage has the member {unknown[:40]!r}, which is no parameter of the text")
        program.grads = _gradients(program, bool(updates.nodes), gradients)
        _add_shards(program)
        updates.read(optimizer, flags)
    except ValueError as problem:
        raise error(last, str(problem)) from None
    updates.finish_state()
    describe_collectives(program)


def _source(line: TextLine) -> Source:
    """Where the value of an input comes from. Raises ValueError."""
    if line.op in _PLAIN:
        return Source(line.op, line.name)
    if line.op == _PART or _SHARED.fullmatch(line.op):
        return Source("parameter", line.name)
    if line.op != _HYPER and not _STATE.fullmatch(line.op) and not line.op.startswith("flat "):
        raise ValueError(f"{line.op[:40]!r} is no input; write one of {', '.join(_PLAIN)}, state, {_HYPER}, flat [a@0]")
    owned = _OWNED.fullmatch(line.name)
    if owned is None:
        raise ValueError(f"{line.name[:40]!r} belongs to no update; name it as in update.0.lr")
    kind = "hyper" if line.op == _HYPER else line.op.partition(" ")[0]
    return Source(kind, owned[2], int(owned[1]))


def _add_params(program: Program, lines: Mapping[fx.Node, TextLine]) -> None:
    sequence = 0
    for node, source in program.sources.items():
        spec = info(node).spec
        if source.kind != "parameter" or not isinstance(spec, TensorSpec):
            continue
        trainable = spec.dtype.is_floating_point or spec.dtype.is_complex
        number = sequence if trainable else -1
        shared = _SHARED.fullmatch(lines[node].op)
        is_block = spec.is_dense and shared is None
        program.params[source.name] = Parameter(
            source.name,
            spec,
            trainable,
            number,
            movable=is_block and lines[node].op != _PART,
            is_block=is_block,
            shares=tuple(shared[1].split(", ")) if shared else (),
        )
        sequence += trainable


def _add_shards(program: Program) -> None:
    """Which parameters are updated in rows: of those the graph makes the rows, or reduces them. Raises ValueError."""
    found = {
        parameter_of_rows(node): (group_of_rows(node), owner_of_rows(node))
        for node in program.graph.nodes
        if gives_rows(node)
    }
    for name, grad in program.grads.items():
        while grad.target in (aten._to_copy.default, aten.clone.default, of_owner, WAIT):
            grad = grad.all_input_nodes[0]
        if is_start(grad) and kind_of(grad) == "reduce_scatter":
            if tensor_spec(grad).shape != program.params[name].spec.shape:
                found[name] = group_of(grad), None
        if is_start(grad) and kind_of(grad) == "reduce":
            found[name] = group_of(grad), root_of(grad)
    for name, (group, owner) in found.items():
        if name not in program.params:
            raise ValueError(f"{name_of_rows(name)} are rows of no parameter")
        program.params[name] = replace(program.params[name], shard=group, owner=owner)


def _gradients(program: Program, updated: bool, given: Sequence[str] | None) -> dict[str, fx.Node]:
    """The gradients that the step returns, by their parameters. Raises ValueError."""
    all_returned: Any = program.output.args[0]
    returned = all_returned[1 : len(all_returned) - len(program.aux)]
    if not returned:
        return {}
    if updated or any(node.target is optimizer_step for node in program.graph.nodes):
        raise ValueError("it returns gradients, but a step that updates its parameters returns only its loss")
    names = list(given) if given is not None else _by_shape(program, returned)
    unknown = next((name for name in names if name not in program.params), None)
    if unknown is not None or len(names) != len(returned):
        what = f"{unknown!r} is no parameter" if unknown is not None else f"{len(names)} names"
        raise ValueError(
            f"gradients= has {what}, and {len(returned)} gradients are returned; name each one's parameter"
        )
    return dict(zip(names, returned, strict=True))


def _by_shape(program: Program, returned: Sequence[fx.Node]) -> list[str]:
    """The parameters that these are gradients of, in their order: all of them, or the only choice that shapes allow."""
    params = [param for param in program.params.values() if param.trainable]
    first = _matched(params, returned)
    last = _matched(params[::-1], returned[::-1])
    if first is None or last is None or first != last[::-1]:
        raise ValueError(
            f"shapes do not tell which of {len(params)} parameter(s) the {len(returned)} returned gradient(s) belong "
            "to; name them with gradients="
        )
    return first


def _matched(params: Sequence[Parameter], returned: Sequence[fx.Node]) -> list[str] | None:
    """For each gradient the next parameter of its shape; None where there is none."""
    rest = iter(params)
    found = []
    for grad in returned:
        shape = getattr(info(grad).spec, "shape", None)
        param = next((param for param in rest if param.spec.shape == shape), None)
        if param is None:
            return None
        found.append(param.name)
    return found
