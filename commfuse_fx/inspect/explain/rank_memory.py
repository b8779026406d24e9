"""What one rank holds from step to step, and what it would hold if nothing were divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from commfuse_fx.inspect.explain.table import aligned
from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Parameter, Program
from commfuse_fx.ir.rows.shard_owners import holds_of_owner
from commfuse_fx.ir.rows.shard_rows import name_of_gradient, spec_of_rows
from commfuse_fx.ir.updates.updates import is_scalar

_Owner = tuple[str, int] | None
"""The group and the position there of the one rank that holds something; None where every rank holds as much."""

_HEAD = ("", "whole", "per rank")

_PARTS = (aten.alias.default, aten.constant_pad_nd.default, aten.narrow.default, of_owner)
"""What gives a rank its part of a gradient."""


@dataclass(frozen=True)
class HeldBytes:
    """The bytes of one kind of tensors.

    kind: "parameters", "gradients" as the update reads them, "sums of micro-batches" that are kept for that, or
        "optimizer state".
    whole: bytes where nothing is divided, as on one device and in plain data parallel.
    per_rank: bytes that each rank holds in this step, with the padding of rows that do not divide. Where ranks own
        parameters, those of the rank that holds most.
    """

    kind: str
    whole: int
    per_rank: int


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, as the graph has it.

    mesh: the ranks, as in "dp=8".
    held: the bytes of each kind of tensors. State of an optimizer that has no rule is not among them.
    peak: predicted bytes that the step has allocated at most, activations included.
    unknown: what the graph does not show; "" if it shows everything.
    """

    mesh: str
    held: tuple[HeldBytes, ...]
    peak: int
    unknown: str = ""

    @property
    def is_divided(self) -> bool:
        """Whether a rank holds only a part of anything."""
        return any(each.per_rank != each.whole for each in self.held)

    def text(self) -> str:
        """The same as a table for people."""
        total = HeldBytes("together", sum(each.whole for each in self.held), sum(each.per_rank for each in self.held))
        rows = [(f"  {each.kind}", str(each.whole), str(each.per_rank)) for each in (*self.held, total)]
        unknown = f"  {self.unknown}\n" if self.unknown else ""
        return (
            f"memory per rank on {self.mesh}, in bytes (whole: where nothing is divided, as on one device)\n"
            f"{aligned((_HEAD, *rows), _HEAD[1:])}{unknown}"
            f"  predicted peak of the step, with activations: {self.peak} bytes\n"
        )


def rank_memory(program: Program, peak: int) -> RankMemory:
    """What a rank holds of this program, whose predicted peak memory is given."""
    graded, given = [program.params[name] for name in _with_gradients(program)], _given(program)
    parameters = _held(
        "parameters", ((None, _whole(param).nbytes, param.spec.nbytes) for param in _once(program.params))
    )
    sums = [_held("sums of micro-batches", each) for each in [[*_sums(program)]] if each]
    if sums and not graded:
        unknown = "it updates nothing: the graph of the last micro-batch shows gradients and the optimizer's state"
        return RankMemory(str(program.mesh), (parameters, *sums), peak, unknown)
    gradients = _held(
        "gradients",
        (
            (None, _whole(param).nbytes, given[param.name])
            if param.name in given
            else (_owner(param), _whole(param).nbytes, spec_of_rows(param, program.mesh).nbytes)
            for param in graded
        ),
    )
    held = (parameters, gradients, *sums)
    optimizer = program.optimizer
    if optimizer is not None and optimizer.rule == "opaque":
        unknown = f"{optimizer.class_name} holds its state itself, so the graph does not show how much that is"
        return RankMemory(str(program.mesh), held, peak, unknown)
    return RankMemory(str(program.mesh), (*held, _held("optimizer state", _states(program))), peak)


def _held(kind: str, each: Iterable[tuple[_Owner, int, int]]) -> HeldBytes:
    """The sums of bytes: of all, and of what a rank holds."""
    found = list(each)
    of_all = sum(part for owner, _, part in found if owner is None)
    owned: dict[str, Counter[int]] = {}
    for owner, _, part in found:
        if owner is not None:
            group, position = owner
            owned.setdefault(group, Counter())[position] += part
    most = sum(max(each.values()) for each in owned.values())
    return HeldBytes(kind, sum(whole for _, whole, _ in found), of_all + most)


def _owner(param: Parameter) -> _Owner:
    return None if param.owner is None else (param.shard, param.owner)


def _whole(param: Parameter) -> TensorSpec:
    return param.whole or param.spec


def _once(params: dict[str, Parameter]) -> Iterator[Parameter]:
    """Of parameters that share memory the largest."""
    seen: dict[str, None] = {}
    for param in sorted(params.values(), key=lambda each: -each.spec.nbytes):
        if not any(other in seen for other in param.shares):
            seen[param.name] = None
            yield param


def _with_gradients(program: Program) -> list[str]:
    """The parameters whose gradients the step computes: for its update, or for its caller."""
    updated = [name for update in program.updates for segment in update.segments for name, _ in segment.members]
    for node in program.graph.find_nodes(op="call_function", target=optimizer_step):
        params: Any = node.args[0]
        updated += [program.sources[param].name for param in params]
    return [*updated, *program.grads]


def _given(program: Program) -> dict[str, int]:
    """The bytes of the gradients that are inputs, which the caller holds, by the names of their parameters."""
    made = {info(node).name: node for node in program.graph.nodes if node.op == "call_function"}
    grads = {name: made.get(name_of_gradient(name)) for name in program.params}
    inputs = {name: _input_behind(program, node) for name, node in grads.items() if node is not None}
    return {name: tensor_spec(node).nbytes for name, node in inputs.items() if node is not None}


def _input_behind(program: Program, node: fx.Node) -> fx.Node | None:
    while node.op == "call_function" and node.target in _PARTS:
        node = node.all_input_nodes[0]
    return node if node in program.sources and program.sources[node].kind == "input" else None


def _sums(program: Program) -> Iterator[tuple[_Owner, int, int]]:
    """(who holds it, bytes of all of it, bytes that a rank holds) of what micro-batches leave of each gradient."""
    for node, source in program.sources.items():
        if source.kind == "gradient":
            param = program.params[source.name.removesuffix(".grad")]
            yield _owner(param) if holds_of_owner(node) else None, _whole(param).nbytes, tensor_spec(node).nbytes


def _states(program: Program) -> Iterator[tuple[_Owner, int, int]]:
    """(who holds it, bytes of all of it, bytes that a rank holds) of each state of each parameter."""
    views = program.aliases()
    for node, source in program.sources.items():
        if source.kind != "state" or node in views:
            continue
        specs = info(node).spec
        assert isinstance(specs, tuple), "a state is a list of tensors"
        for segment, spec in zip(program.updates[source.owner].segments, specs, strict=True):
            assert isinstance(spec, TensorSpec)
            size = spec.dtype.itemsize
            for param in [program.params[name] for name, _ in segment.members]:
                if is_scalar(source.name):
                    yield None, size, size
                else:
                    numel = spec_of_rows(param, program.mesh).numel
                    yield _owner(param), _whole(param).numel * size, numel * size
