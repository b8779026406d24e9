"""Make one update per bucket, to run as soon as that has arrived, on gradients that lie in memory as parameters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, info, same_layout, tensor_spec
from commfuse_fx.ir.core.program import Program, Source, Update
from commfuse_fx.ir.rows.shard_rows import spec_of_rows, updated_nodes
from commfuse_fx.ir.updates.update_layout import takes_blocks
from commfuse_fx.ir.updates.updates import gradients_of, unclipped, update_nodes
from commfuse_fx.kernels.emit_updates import emit_update
from commfuse_fx.kernels.rows import put_rows_
from commfuse_fx.passes.declaration import Pass, Situation

_LIKE = NodeInfo("update")


@dataclass(frozen=True)
class SplitUpdates(Pass):
    """Bitwise neutral: the rules are elementwise. Gradients that nobody reduces share one update.

    `across_steps` False: all updates run together at the end of the step, and one is as good as many. Either way fused
    updates get gradients with the strides of their parameters, by a copy where they have others.
    """

    name = "split_updates"
    numerics = "bitwise"
    requires = ("flat",)
    ensures = ("split",)

    across_steps: bool = True

    @classmethod
    def when(cls, situation: Situation) -> SplitUpdates | None:
        return cls(situation.across_steps)

    def __call__(self, program: Program) -> bool:
        if not program.updates:
            return False
        split = self.across_steps and self._split(program)
        return _lay_out_gradients(program) or split

    def _split(self, program: Program) -> bool:
        nodes, updated = update_nodes(program), updated_nodes(program)
        work = [_Old(program, owner, nodes[owner], updated) for owner in range(len(program.updates))]
        if any(unclipped(grad) is not grad for old in work for grad in old.grads):
            return False  # no update can run before the norm of all gradients is known
        if all(len(old.by_bucket()) == 1 for old in work):
            return False
        inputs: list[list[fx.Node]] = [[] for _ in work]
        for node, source in program.sources.items():
            if source.kind in ("state", "hyper"):
                inputs[source.owner].append(node)
        places = [_behind(old.nodes[-1], nodes) for old in work]  # in front of what sends the updated parameters
        for old in work:
            old.erase(inputs[old.owner])
        program.updates = []
        for old, place in zip(work, places, strict=True):
            for positions in old.by_bucket():
                old.emit(positions, place)
        return True


def _behind(node: fx.Node, nodes: Sequence[Sequence[fx.Node]]) -> fx.Node:
    """The first node behind this one that belongs to no update. nodes: those of each update."""
    known = dict.fromkeys(each for update in nodes for each in update)
    while node in known:
        node = node.next
    return node


class _Old:
    """One update as it was, taken apart. updated: as in `updated_nodes`."""

    def __init__(self, program: Program, owner: int, nodes: list[fx.Node], updated: Mapping[str, fx.Node]) -> None:
        self.program = program
        self.owner = owner
        self.update = program.updates[owner]
        self.nodes = nodes
        self.grads = gradients_of(nodes)
        self.params = [self._param(i, updated) for i in range(len(self.update.segments))]
        assert program.optimizer is not None
        self.flags = dict(program.optimizer.groups[self.update.group].flags)
        self._mine = dict.fromkeys(nodes)

    def _param(self, position: int, updated: Mapping[str, fx.Node]) -> fx.Node:
        segment = self.update.segments[position]
        name = segment.members[0][0]
        if not segment.is_flat:
            return updated[name]
        found = self.program.placeholder("flat", name, self.owner)
        assert found is not None
        return found

    def by_bucket(self) -> list[list[int]]:
        """Positions in the update's lists, grouped by the collective that brings their gradients.

        Parameters that share memory stay together, to be updated in the optimizer's order.
        """
        groups: dict[fx.Node | str | None, list[int]] = {}
        for position, grad in enumerate(self.grads):
            shares = any(self.program.params[name].shares for name, _ in self.update.segments[position].members)
            groups.setdefault("shared" if shares else _wait_behind(grad), []).append(position)
        return list(groups.values())

    def erase(self, inputs: Sequence[fx.Node]) -> None:
        """Take the update's own nodes and `inputs` out of the graph; parameters and gradients stay."""
        program = self.program
        kept = dict.fromkeys(self.grads)
        for node in reversed(self.nodes):
            program.names.release(info(node).name)
            if node not in kept and not node.users:
                program.graph.erase_node(node)
        for node in inputs:
            program.names.release(info(node).name)
            program.remove_source(node)
            program.graph.erase_node(node)

    def emit(self, positions: Sequence[int], place: fx.Node) -> None:
        """Write an update of the parameters at these positions in front of a node."""
        program = self.program
        number = len(program.updates)
        segments = [self.update.segments[i] for i in positions]
        for i in positions:
            if self.update.segments[i].is_flat:
                name = self.update.segments[i].members[0][0]
                program.add_source(self.params[i], Source("flat", name, number))
        update = Update(self.update.rule, self.update.group, segments)
        params, grads = [self.params[i] for i in positions], [self.grads[i] for i in positions]
        self._rename(grads, number)
        emit_update(Builder(program), update, self.flags, params, grads, before=place)

    def _rename(self, grads: Sequence[fx.Node], number: int) -> None:
        """Views and casts of gradients that were made for the update carry its number."""
        old, new = f"update.{self.owner}/", f"update.{number}/"
        for grad in grads:
            for node in (grad, *grad.all_input_nodes):
                if node in self._mine:
                    info(node).name = self.program.names.reserve(new + info(node).name.removeprefix(old))


def _lay_out_gradients(program: Program) -> bool:
    """Copy gradients whose strides are not those of their parameters, which fused and list ops do not look at."""
    nodes = update_nodes(program)
    build = Builder(program)
    modified = False
    for owner, update in enumerate(program.updates):
        if not any(map(takes_blocks, nodes[owner])):
            continue
        for segment, grad in zip(update.segments, gradients_of(nodes[owner]), strict=True):
            name, _ = segment.members[0]
            spec, given = spec_of_rows(program.params[name], program.mesh), tensor_spec(grad)
            if segment.is_flat or same_layout(spec.shape, spec.stride, given.stride):
                continue
            with build.before(nodes[owner][0]):
                laid_out = _laid_out(build, grad, spec, f"update.{owner}/grads.{name}")
            for node in nodes[owner]:
                node.replace_input_with(grad, laid_out)
            modified = True
    return modified


def _laid_out(build: Builder, grad: fx.Node, wanted: TensorSpec, name: str) -> fx.Node:
    """A copy of a gradient with the strides of its parameter, which is dense."""
    dims = range(len(wanted.shape))
    order = sorted(dims, key=lambda dim: (-wanted.stride[dim], dim))
    by_memory = _permuted(build, grad, order, f"{name}.permute")
    plain = tensor_spec(by_memory).with_shape(tensor_spec(by_memory).shape)
    kwargs = {"memory_format": torch.contiguous_format}
    made = build.call(aten.clone.default, (by_memory,), kwargs, spec=plain, like=_LIKE, name=f"{name}.laid_out")
    return _permuted(build, made, [order.index(dim) for dim in dims], f"{name}.as_parameter")


def _permuted(build: Builder, value: fx.Node, order: list[int], name: str) -> fx.Node:
    if order == sorted(order):
        return value
    spec = tensor_spec(value)
    shape, stride = (tuple(each[dim] for dim in order) for each in (spec.shape, spec.stride))
    permuted = TensorSpec(shape, spec.dtype, stride, spec.device)
    return build.call(aten.permute.default, (value, order), spec=permuted, like=_LIKE, name=name)


def _wait_behind(grad: fx.Node) -> fx.Node | None:
    node = grad
    while not is_wait(node):
        if not is_view(node) and node.target not in (aten._to_copy.default, put_rows_):
            return None
        node = node.all_input_nodes[0]
    return node
