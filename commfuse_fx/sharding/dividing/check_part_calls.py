"""Checks of calls that compute with a rank's own part of the batch (`cross_batch=True`), and notes on them.

Why: docs/decisions.md, "A call with cross_batch has a border".
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.dependence import written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.placement import P, Placement, R, S, Shard
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.choose_strategy import Chooser
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.dividing.own_parts import own_values
from commfuse_fx.sharding.dividing.written_inputs import writes_input
from commfuse_fx.sharding.marking.part_ops import (
    ENTERING,
    MEAN_OF_PARTS,
    OWN_ROWS,
    ROWS_OF_PARTS,
    PartCall,
    call_of_part,
    has_parts,
)
from commfuse_fx.sharding.rules.writing.call import AllReduce, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import strategies_of

NOTED = "own part of the batch"
"""Topic of the notes on these calls."""


def check_part_calls(program: Program) -> None:
    """Raise ConfigValueError where a marked call does not mean the same as in data parallel, or means nothing. Note the
    others."""
    if not has_parts(program):
        return
    own = own_values(program)
    entered = [node for node in own if node.target in ENTERING and info(node).phase == "forward"]
    calls = [call_of_part(node) for node in entered]
    _refuse_leaks(program, own, calls)
    _check_inputs(program, entered)
    rows = _Rows(program, own)
    for node in program.graph.nodes:
        if node.target == ROWS_OF_PARTS and info(node).phase == "forward":
            rows.check_result(node)
        elif node.target == MEAN_OF_PARTS:
            _check_mean(program, node, rows)
    parts = next(node.args[1] for node in entered)
    for call in dict.fromkeys(calls):
        program.note(NOTED, call.subject or "the model", f"each of {parts} parts by itself: {call.place}")
        if call.reduces and call.number not in rows.reducing:
            raise ConfigValueError(
                f"{call.label} combines no samples of the batch, so that the mark means nothing: mark what computes a "
                "mean, a normalisation or a loss over the batch, or leave cross_batch out"
            )


def _refuse_leaks(program: Program, own: Mapping[fx.Node, None], calls: Sequence[PartCall]) -> None:
    results = [program.loss, *program.grads.values(), *program.aux.values()]
    for node in program.graph.nodes:
        if writes_input(node) and program.sources[node.args[0]].kind != "buffer":
            results.append(node.args[1])
    leaked = next((node for node in results if node in own), None)
    if leaked is not None:
        raise ConfigValueError(
            f"{calls[0].label}: {info(leaked).name} follows from what the call computes with its part of the batch, "
            "but is no result of it, and each rank would have another one. Hand tensors to the call as arguments, "
            "take them from its result, and read buffers that it writes in marked calls alone"
        )


def _check_inputs(program: Program, entered: Sequence[fx.Node]) -> None:
    """Dimension 0 of what enters is the batch exactly where it follows from the batch."""
    batch: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        source = program.sources.get(node)
        is_batch = source is not None and source.kind == "input" and source.name in program.batch_inputs
        if is_batch or any(value in batch for value in node.all_input_nodes):
            batch[node] = None
    for node in entered:
        (given,) = node.all_input_nodes
        shape = tensor_spec(given).shape
        label = call_of_part(node).label
        if node.target == OWN_ROWS and given not in batch:
            raise ConfigValueError(
                f"{label} gets a tensor of shape {shape} with as many rows as the batch, or a multiple, which does not "
                "follow from the batch: let the call make it itself"
            )
        if node.target != OWN_ROWS and given in batch and shape:
            raise ConfigValueError(
                f"{label} gets a tensor of shape {shape} of the batch, whose dimension 0 is not the batch: hand it "
                "over with the batch in front, and transpose inside of the call"
            )


class _Rows:
    """Follows the batch through the forward of marked calls.

    dims: for a node, or each of its results, the dimension of the batch; None for what has none. What is not known is
    left out. reducing: the numbers of the calls that combine samples.
    """

    def __init__(self, program: Program, own: Mapping[fx.Node, None]) -> None:
        self.chooser = Chooser({node: Value(info(node).spec) for node in program.graph.nodes}, 1)
        self.dims: dict[fx.Node, tuple[int | None, ...]] = {}
        self.reducing: dict[int, None] = {}
        self._calls: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            if node in own and node.op == "call_function" and info(node).phase == "forward":
                self._follow(node)

    def strategies(self, node: fx.Node) -> tuple[Strategy, ...]:
        """Those of a node among one rank, where every size divides."""
        return strategies_of(self.chooser.describe(node, (1,)).call)

    def check_result(self, node: fx.Node) -> None:
        (given,) = node.all_input_nodes
        if self.dims.get(given, (0,)) != (0,):
            raise ConfigValueError(
                f"{call_of_part(node).label} returns a tensor whose dimension 0 is not the batch: mark the function or "
                "module that uses it, up to where there are rows or a loss"
            )

    def _follow(self, node: fx.Node) -> None:
        if node.target in ENTERING:
            self._calls[node] = call_of_part(node).number
            self.dims[node] = (0,) if node.target == OWN_ROWS else (None,)
            return
        numbers = {self._calls[value]: None for value in node.all_input_nodes if value in self._calls}
        for number in numbers:
            self._calls.setdefault(node, number)
        if node.target is operator.getitem:
            parent, item = _parent_and_item(node)
            if parent in self.dims:
                self.dims[node] = (self.dims[parent][item],)
            return
        found = None if written_nodes(node) else self._strategy(node)
        if found is None or P in found.outputs or any(isinstance(step, AllReduce) for step in found.steps):
            self.reducing |= numbers
        if found is not None:
            self.dims[node] = tuple(each.dim if isinstance(each, Shard) else None for each in found.outputs)

    def _strategy(self, node: fx.Node) -> Strategy | None:
        """The one with which parts of the batch are parts of the result, or else summands; None if there is none."""
        described = self.chooser.describe(node, (1,))
        wanted: list[Placement] = []
        for value in described.inputs:
            if value not in self.dims and value in self._calls:
                return None
            dim = self.dims.get(value, (None,))[0]
            wanted.append(R if dim is None else S(dim))
        fitting = [each for each in strategies_of(described.call) if list(each.inputs) == wanted]
        return min(fitting, key=lambda each: (P in each.outputs, len(each.steps)), default=None)


def _check_mean(program: Program, node: fx.Node, rows: _Rows) -> None:
    """The mean over the parts means the same as in data parallel where the loss is linear in it."""
    left, seen = [node], {node: None}
    while left:
        value = left.pop()
        for user in _users_in_forward(program, value):
            if not _is_linear(user, value, rows):
                raise ConfigValueError(
                    f"{call_of_part(node).label} returns one number, which {info(user).name} ({info(user).source}) "
                    "does not merely add to the loss, and each rank has another one: mark the function or module that "
                    "uses it, up to where there are rows or a loss"
                )
            if user not in seen:
                seen[user] = None
                left.append(user)


def _users_in_forward(program: Program, node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and info(user).phase == "forward":
            yield user


def _is_linear(user: fx.Node, value: fx.Node, rows: _Rows) -> bool:
    if not isinstance(info(user).spec, TensorSpec):
        return False
    inputs = rows.chooser.describe(user, (1,)).inputs
    return any(
        each.outputs == (P,) and all(p == P for given, p in zip(inputs, each.inputs, strict=True) if given is value)
        for each in rows.strategies(user)
    )


def _parent_and_item(node: fx.Node) -> tuple[Any, Any]:
    parent, item = node.args
    return parent, item
