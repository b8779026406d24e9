"""A rank that keeps a part of a sum over ranks takes this part of the summands: less is added up, and less is sent."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from commfuse_fx.ir.edit import replace_all
from commfuse_fx.ir.meta import info, set_info, tensor_spec
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.redistribution import own_part, sum_partial
from commfuse_fx.sharding.dividing.variation import varies

aten = torch.ops.aten


def sum_parts(program: Program) -> None:
    """The part of a sum becomes the sum of parts, where nothing else needs the whole sum.

    One axis is divided after the other. So a sum over the first stands in the graph when the second one divides it.
    """
    for node in [node for node in program.graph.nodes if node.target is own_part]:
        if chain := _sums(node):
            _take_part_first(program, node, chain)


def _sums(node: fx.Node) -> list[fx.Node]:
    """The sums that a part is taken of, with the casts around them, the last one first.

    A sum over ranks that keep different parts is none of them: each of these needs all summands of its own part.
    """
    found: list[fx.Node] = []
    value, index = node.args[:2]
    assert isinstance(index, fx.Node)
    group = {*(info(index).varies or "").split(",")}
    while isinstance(value, fx.Node) and value.target in (sum_partial, aten._to_copy.default) and len(value.users) == 1:
        if value.target is sum_partial and group & {*str(value.args[1]).split(",")}:
            break
        found.append(value)
        value = value.args[0]
    return found if any(each.target is sum_partial for each in found) else []


def _take_part_first(program: Program, node: fx.Node, chain: list[fx.Node]) -> None:
    whole, index = chain[-1].args[0], node.args[1]
    assert isinstance(whole, fx.Node) and isinstance(index, fx.Node)
    replace_all(program, {node: chain[0]})
    with program.graph.inserting_before(chain[-1]):
        part = program.graph.call_function(own_part, (whole, *node.args[1:]))
    spec, group = tensor_spec(node), info(index).varies
    assert group is not None, "an index differs between the ranks of its group"
    set_info(part, replace(info(node), spec=spec.with_dtype(tensor_spec(whole).dtype), varies=info(whole).varies))
    chain[-1].replace_input_with(whole, part)
    for each in (part, *chain):
        info(each).spec = spec.with_dtype(tensor_spec(each).dtype)
        varies(each, group)
    program.graph.erase_node(node)
