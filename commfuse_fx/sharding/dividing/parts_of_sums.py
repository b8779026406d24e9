"""A rank that keeps a part of a sum over ranks takes this part of the summands: less is added up, and less is sent.

A part is cut out, or comes from a sum over the ranks of other mesh axes, each of which keeps its part of that sum.

Why: docs/decisions.md, "The order of sums over several axes is mended after all axes are divided".
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import info, set_info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.redistribution import own_part, sum_and_divide, sum_partial
from commfuse_fx.sharding.dividing.variation import varies

aten = torch.ops.aten


def sum_parts(program: Program) -> None:
    """The part of a sum becomes the sum of parts, where nothing else needs the whole sum.

    One axis is divided after the other. So a sum over the first stands in the graph when the second one divides it.
    """
    for node in [node for node in program.graph.nodes if node.target in (own_part, sum_and_divide)]:
        if chain := _sums(node):
            _take_part_first(program, node, chain)


def _sums(node: fx.Node) -> list[fx.Node]:
    """The sums that a part is taken of, the last one first; of a part that is cut out, with the casts around them.

    A sum over ranks that keep different parts is none of them: each of these needs all summands of its own part. Parts
    that are themselves summed keep the precision in which they are.
    """
    found: list[fx.Node] = []
    value, group = node.args[0], {*_group(node).split(",")}
    is_cut = node.target is own_part
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if value.target is sum_partial:
            goes_along = not group & {*str(value.args[1]).split(",")} and (is_cut or value.args[2] == "sum")
        else:
            goes_along = is_cut and value.target is aten._to_copy.default
        if not goes_along:
            break
        found.append(value)
        value = value.args[0]
    return found if any(each.target is sum_partial for each in found) else []


def _group(node: fx.Node) -> str:
    """The mesh axes along which ranks keep different parts."""
    if node.target is sum_and_divide:
        return str(node.args[1])
    index = node.args[1]
    assert isinstance(index, fx.Node)
    group = info(index).varies
    assert group is not None, "an index differs between the ranks of its group"
    return group


def _take_part_first(program: Program, node: fx.Node, chain: list[fx.Node]) -> None:
    whole, group = chain[-1].args[0], _group(node)
    assert isinstance(whole, fx.Node) and callable(node.target)
    replace_all(program, {node: chain[0]})
    with program.graph.inserting_before(chain[-1]):
        part = program.graph.call_function(node.target, (whole, *node.args[1:]))
    spec = tensor_spec(node)
    set_info(part, replace(info(node), spec=spec.with_dtype(tensor_spec(whole).dtype), varies=info(whole).varies))
    chain[-1].replace_input_with(whole, part)
    for each in (part, *chain):
        info(each).spec = spec.with_dtype(tensor_spec(each).dtype)
        varies(each, group)
    program.graph.erase_node(node)
