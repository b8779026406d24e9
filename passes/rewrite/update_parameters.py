"""Write the optimizer's update into the graph: one node, or a few, per param group."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.functions import axis_index, optimizer_step
from commfuse_fx.ir.core.meta import NodeInfo, tensor_spec
from commfuse_fx.ir.core.program import OptimizerInfo, Parameter, Program, Segment, Update
from commfuse_fx.ir.rows.shard_owners import part_of_owner
from commfuse_fx.ir.rows.shard_rows import name_of_gradient, name_of_rows, padding_of, spec_of_rows
from commfuse_fx.kernels.emit_updates import emit_update
from commfuse_fx.passes.declaration import Pass, Situation

_LIKE = NodeInfo("update")


@dataclass(frozen=True)
class UpdateParameters(Pass):
    """All updates stand at the end: nothing the user owns changes before the whole step has succeeded.

    Gradients that the optimizer has no use for are neither reduced nor computed.
    """

    name = "update_parameters"
    numerics = "defines"
    requires = ("reduced",)
    ensures = ("updated",)

    @classmethod
    def when(cls, situation: Situation) -> UpdateParameters | None:
        return None if situation.holds_gradients else cls()

    def __call__(self, program: Program) -> bool:
        if program.optimizer is None:
            return False
        optimizer = program.optimizer
        handled = dict.fromkeys(name for group in optimizer.groups for name in group.params)
        unused = [name for name in program.grads if name not in handled]
        for name in unused:
            program.note("not updated", name, "the optimizer does not hold it")
        if optimizer.rule == "opaque":
            _emit_opaque(Builder(program), optimizer, [name for name in program.grads if name in handled])
        else:
            _emit_rule(Builder(program), optimizer)
        program.grads = {}
        program.set_output()
        if unused:
            remove_dead_nodes(program)
        return True


def _emit_opaque(build: Builder, optimizer: OptimizerInfo, names: list[str]) -> None:
    program = build.program
    program.note(
        "opaque update",
        optimizer.class_name,
        f"{optimizer.why_opaque}: its own step() is called on separate gradients at the end of the step",
    )
    params = [program.placeholder("parameter", name) for name in names]
    grads = [program.grads[name] for name in names]
    with build.before(program.output):
        build.call(optimizer_step, (params, grads), spec=None, like=_LIKE, name=f"update/{optimizer.class_name}")


def _emit_rule(build: Builder, optimizer: OptimizerInfo) -> None:
    program, rows = build.program, _RowsOfRank(build)
    for number, group in enumerate(optimizer.groups):
        # Fused kernels want one dtype and device per call, and blocks of memory.
        parts: dict[tuple[torch.dtype, str, bool], list[str]] = {}
        for name in group.params:
            if name in program.grads:
                param = program.params[name]
                _refuse_expanded(param)
                parts.setdefault((param.spec.dtype, param.spec.device, param.is_block), []).append(name)
        for names in parts.values():
            segments = [Segment(((name, 0),), program.params[name].spec.numel) for name in names]
            params = [rows.updated(name) for name in names]
            grads = [rows.gradient(name) for name in names]
            emit_update(build, Update(optimizer.rule, number, segments), dict(group.flags), params, grads)


class _RowsOfRank:
    """The rows of parameters that this rank updates."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._index: dict[str, fx.Node] = {}
        self._begin: dict[tuple[str, int], fx.Node] = {}

    def updated(self, name: str) -> fx.Node:
        """The parameter, or the rows of it that this rank updates: a view, or of a padded one a copy."""
        program = self._build.program
        param, whole = program.params[name], program.placeholder("parameter", name)
        assert whole is not None, "what has a gradient is an input"
        if not param.shard:
            return whole
        if param.owner is not None:
            with self._build.before(program.output):
                return part_of_owner(self._build, name, whole, name_of_rows(name))
        return self._rows(param, whole, "padded", name_of_rows(name))

    def gradient(self, name: str) -> fx.Node:
        """The gradient of what this rank updates. One that was given is an input, and whole until here."""
        program, label = self._build.program, name_of_gradient(name)
        param, grad = program.params[name], program.grads[name]
        if tensor_spec(grad).shape != spec_of_rows(param, program.mesh).shape:
            return self._rows(param, grad, "padded_gradient", label)
        if grad.op != "placeholder":
            return grad
        with self._build.before(program.output):  # inputs among what an update takes are parameters and states
            return self._build.call(aten.alias.default, (grad,), spec=tensor_spec(grad), like=_LIKE, name=label)

    def _rows(self, param: Parameter, whole: fx.Node, padded: str, label: str) -> fx.Node:
        """This rank's rows of a tensor that lies as the parameter does. padded, label: parts of names."""
        build, mesh = self._build, self._build.program.mesh
        rows, padding = spec_of_rows(param, mesh), padding_of(param, mesh)
        with build.before(build.program.output):
            if padding:
                whole = build.padded(whole, padding, _LIKE, f"shard/{param.name}/{padded}")
            args = (whole, 0, self._begin_of(param.shard, rows.shape[0]), rows.shape[0])
            return build.call(aten.narrow.default, args, spec=rows, like=_LIKE, name=label)

    def _begin_of(self, group: str, rows: int) -> fx.Node:
        """The first row of this rank, where each has so many."""
        build = self._build
        if group not in self._index:
            name = f"shard/index/{group}"
            self._index[group] = build.call(axis_index, (group,), spec=None, like=_LIKE, name=name)
        if (group, rows) not in self._begin:
            args, name = (self._index[group], rows), f"shard/begin.{rows}/{group}"
            self._begin[group, rows] = build.call(operator.mul, args, spec=None, like=_LIKE, name=name)
        return self._begin[group, rows]


def _refuse_expanded(param: Parameter) -> None:
    """As torch.optim does, but before the step has sent anything."""
    if any(size > 1 and stride == 0 for size, stride in zip(param.spec.shape, param.spec.stride, strict=True)):
        raise CaptureError(
            f"parameter {param.name} of shape {list(param.spec.shape)} and strides {list(param.spec.stride)} has "
            "several elements in one place of memory, as expand() makes them; PyTorch's optimizers cannot update it: "
            "make it a tensor of its own with .clone(), or keep the small tensor as the parameter and expand it in "
            "the forward"
        )
