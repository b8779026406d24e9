"""Ops at the border of a call that computes with a rank's own part of the batch, as data parallelism does.

They are nodes of the graph from capture until the graph is divided. `parts` is the number of ranks among which the
batch is still to be divided: a division by an axis over which the batch lies lowers it, and at 1 an op does nothing.
What lies between the ops has the shapes of a rank's part.

Why: docs/decisions.md, "A call with cross_batch has a border".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.functions import pure
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.marking.layout_op import erase_nodes

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define("own_rows(Tensor x, int parts, str call) -> Tensor")
_library.define("own_whole(Tensor x, int parts, str call) -> Tensor")
_library.define("rows_of_parts(Tensor x, int parts, str call) -> Tensor")
_library.define("mean_of_parts(Tensor x, int parts, str call) -> Tensor")
_library.define("sum_of_parts(Tensor x, int parts, str call) -> Tensor")

OWN_ROWS = torch.ops.commfuse.own_rows.default
"""Of a tensor whose dimension 0 is the batch: the rank's own rows."""

OWN_WHOLE = torch.ops.commfuse.own_whole.default
"""Of another tensor, such as a parameter: all of it. Its gradient is the sum over the parts."""

ROWS_OF_PARTS = torch.ops.commfuse.rows_of_parts.default
"""The whole tensor of which ranks have computed their own rows."""

MEAN_OF_PARTS = torch.ops.commfuse.mean_of_parts.default
"""The mean of the numbers that ranks have computed."""

SUM_OF_PARTS = torch.ops.commfuse.sum_of_parts.default
"""The sum of the tensors that ranks have computed."""


@pure
def part_number(number: int, parts: int) -> int:
    """The number of the rank's part of the batch, of which `number` is that of a larger one that holds it."""
    return number


ENTERING = (OWN_ROWS, OWN_WHOLE)
LEAVING = (ROWS_OF_PARTS, MEAN_OF_PARTS, SUM_OF_PARTS)
PART_OPS = (*ENTERING, *LEAVING, part_number)


@dataclass(frozen=True)
class PartCall:
    """A call that computes with a rank's own part of the batch.

    number: its number in the step. subject: what was marked. place: the source line of the mark.
    reduces: whether it has to combine rows of the batch for the mark to mean something.
    """

    number: int
    subject: str
    place: str
    reduces: bool = True

    def __str__(self) -> str:
        return f"{self.number}:{int(self.reduces)}:{self.subject}:{self.place}"

    @property
    def label(self) -> str:
        """The call in messages: the line of the mark, and what it marks."""
        return f"{self.place}: {self.subject or 'the model'} with cross_batch=True"


def call_of_part(node: fx.Node) -> PartCall:
    """The call at whose border a node of these ops stands."""
    number, reduces, subject, place = str(node.args[2]).split(":", 3)
    return PartCall(int(number), subject, place, reduces == "1")


def has_parts(program: Program) -> bool:
    """Whether a call of the step computes with a rank's own part of the batch."""
    return any(node.target in ENTERING for node in program.graph.nodes)


def erase_parts(program: Program) -> None:
    """Remove these ops from a graph that is divided over all axes of the batch, where they do nothing."""
    nodes = [node for node in program.graph.nodes if node.target in PART_OPS]
    assert all(node.args[1] == 1 for node in nodes), "the batch is divided over all of its axes"
    erase_nodes(program, nodes)


def _same(x: torch.Tensor, parts: int, call: str) -> torch.Tensor:
    return x.new_empty_strided(x.shape, x.stride())


def _fewer(x: torch.Tensor, parts: int, call: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // parts, *x.shape[1:]))


def _more(x: torch.Tensor, parts: int, call: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * parts, *x.shape[1:]))


def _eager(x: torch.Tensor, parts: int, call: str) -> torch.Tensor:
    assert parts == 1, "the graph is divided before it runs"
    return x.clone()


def _backward_of(gradient: Any, share: bool = False) -> Any:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = gradient(grad, ctx.parts, ctx.call)
        return found / ctx.parts if share else found, None, None

    return backward


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.parts, ctx.call = inputs


for _op, _fake, _gradient in (
    (OWN_ROWS, _fewer, _backward_of(torch.ops.commfuse.rows_of_parts)),
    (OWN_WHOLE, _same, _backward_of(torch.ops.commfuse.sum_of_parts)),
    (ROWS_OF_PARTS, _more, _backward_of(torch.ops.commfuse.own_rows)),
    (MEAN_OF_PARTS, _same, _backward_of(torch.ops.commfuse.own_whole, share=True)),
    (SUM_OF_PARTS, _same, _backward_of(torch.ops.commfuse.own_whole)),
):
    _name = _op.name().removesuffix(".default")
    torch.library.register_fake(_name, _fake, lib=_library)
    torch.library.impl(_name, "CompositeExplicitAutograd", lib=_library)(_eager)
    torch.library.register_autograd(_name, _gradient, setup_context=_keep, lib=_library)
