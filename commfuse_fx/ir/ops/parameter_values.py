"""Which values of a graph are parameters, as they are or in another form."""

from __future__ import annotations

import torch
from torch import fx

from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.redistribution import gather_parts, own_part

aten = torch.ops.aten

_FORMS = (aten._to_copy.default, aten.clone.default, gather_parts, own_part)


def parameter_of(program: Program, node: fx.Node) -> str | None:
    """The name of the parameter that a value is: viewed, cast, cut into parts or gathered of them, so that it is there
    before anything is computed. None: it is none."""
    while node.op == "call_function" and (is_view(node) or node.target in _FORMS):
        node = node.all_input_nodes[0]
    source = program.sources.get(node)
    return source.name if source is not None and source.kind == "parameter" else None
