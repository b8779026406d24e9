"""How calls that compute with a rank's own part of the batch are divided (`cf.shard(..., cross_batch=True)`).

What lies between the ops of `part_ops` has the shapes of a rank's part already. Over an axis of the batch each rank
computes it as it stands, with its own values. Over other axes it is divided as any other op.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.written_inputs import writes_input
from commfuse_fx.sharding.marking.part_ops import (
    ENTERING,
    LEAVING,
    MEAN_OF_PARTS,
    OWN_ROWS,
    PART_OPS,
    ROWS_OF_PARTS,
    has_parts,
    part_number,
)
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import aten
from commfuse_fx.sharding.rules.writing.named import subdivided
from commfuse_fx.sharding.rules.writing.rule_registry import replicated


def own_values(program: Program) -> dict[fx.Node, None]:
    """The nodes of which each part of the batch has a value of its own.

    They follow from what has entered a marked call, up to where they leave it. A buffer that they are written to is one
    of them.
    """
    if not has_parts(program):
        return {}
    found: dict[fx.Node, None] = {}
    before = -1
    while len(found) != before:
        before = len(found)
        for node in program.graph.nodes:
            if node.op != "call_function" or node.target in LEAVING:
                continue
            if writes_input(node):
                target, given = node.args[:2]
                if given in found and program.sources[target].kind == "buffer":
                    found[target] = None
            elif node.target in (*ENTERING, part_number) or any(value in found for value in node.all_input_nodes):
                found[node] = None
    return found


class OwnParts:
    """The values of a program that each rank of a group has of its own part of the batch.

    group: mesh axes. ways: how many ranks they have.
    """

    def __init__(self, program: Program, group: str, ways: int) -> None:
        is_of_batch = group.split(",")[0] in program.batch_axes.split(",")
        self.values = own_values(program) if is_of_batch else {}
        self.ways = ways

    def __contains__(self, node: object) -> bool:
        return node in self.values

    def strategy(self, node: fx.Node, call: OpCall) -> Strategy | None:
        """How ranks compute this node, if that is settled because they have values of their own part."""
        if node not in self.values and not (self.values and node.target in LEAVING):
            return None
        if node.target not in PART_OPS:
            return replicated(call)
        parts = call.args[1] // self.ways
        if node.target == part_number:
            number = subdivided(call.args[0], self.ways)
            return Strategy((R,), (), (number, Step(part_number, (Result(0), parts))))
        step = Step(call.target, (Ref(0), parts, call.args[2]))
        if node.target == OWN_ROWS:
            return Strategy((R,), (S(0),), (step,))
        if node.target in ENTERING:
            return Strategy((R,), (R,), (step,))
        if node.target == ROWS_OF_PARTS:
            return Strategy((S(0),), (R,), (step,))
        if node.target != MEAN_OF_PARTS:
            return Strategy((P,), (R,), (step,))
        share = Step(aten.div.Scalar, (Ref(0), float(self.ways)))
        return Strategy((P,), (R,), (share, replace(step, args=(Result(0), *step.args[1:]))))
