"""Lay activations out channels last from the first convolution on, as CPUs compute convolutions.

oneDNN, which computes float32 convolutions on CPUs, does so channels last. Handed contiguous activations, it reorders
them in every convolution and again in its backward. Other ops follow the strides of what they are given: one copy in
front of the first convolution spares a reordering in each. The gradient of a mean over a map is one number per map: it
is broadcast, which suits every layout, not copied.

Why: docs/decisions.md, "Convolutions in float32 on a CPU get their activations channels last".
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.dependence import written_nodes
from commfuse_fx.ir.core.edit import erase_upwards
from commfuse_fx.ir.core.meta import Spec, TensorSpec, empty_of, info, spec_of, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.fusible import is_pointwise
from commfuse_fx.ir.ops.known_shapes import known_shapes
from commfuse_fx.ir.ops.memory_format import is_channels_last, laid_out, unless_equal
from commfuse_fx.passes.declaration import Pass, Situation

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

# Besides pointwise ops: as fast on channels last, and their results are laid out as tensors without data say.
# Random ops are left out: numbers are drawn in the order of memory.
_FOLLOWING = (
    *_CONVOLUTIONS,
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.cat.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.permute.default,
    aten.clone.default,
    aten.empty_like.default,
    operator.getitem,
)

# Pointwise, and contiguous whatever the strides of their operands, or of one of them.
_NOT_FOLLOWING = (
    aten.pow.Scalar,
    aten.float_power.Scalar,
    aten.copysign.Tensor,
    aten.xlogy.Tensor,
    aten.rrelu.default,
)


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Gradients differ in their last digits: kernels sum in another order. What leaves the step is laid out as before.

    `large_weight`: a convolution stays as it is if its weight, whose gradient has to be copied back, has more bytes
    than this part of its activations. `at_most`: the pass does nothing if it had to copy more bytes than this part of
    what the convolutions read and write.
    """

    name = "channels_last"
    numerics = "reordered"
    needs_sizes = True
    requires = ("simplified",)

    large_weight: float = 0.5
    at_most: float = 0.5

    @classmethod
    def when(cls, situation: Situation) -> ChannelsLast | None:
        return cls() if situation.rewrites_kernels and torch.backends.mkldnn.is_available() else None

    def __call__(self, program: Program) -> bool:
        if not program.training:
            return False
        plan = _Plan(program, self.large_weight)
        if (obstacle := plan.make()) is not None:
            program.note("not channels last", "activations", f"{obstacle} needs them in strides of their own")
            return False
        if not plan.convolutions or not plan.copies:
            return False
        copied = sum(tensor_spec(value).nbytes for value, _ in plan.copies)
        moved = sum(map(_activation_bytes, plan.convolutions))
        pays = copied <= self.at_most * moved
        subject = f"activations of {len(plan.convolutions)} convolution(s)"
        reason = f"{len(plan.copies)} copies of {copied} bytes, for {moved} bytes that the convolutions read and write"
        program.note("channels last" if pays else "not channels last", subject, reason)
        if pays:
            plan.apply()
        return pays


class _Plan:
    """Which values to copy into which format for whom, and the strides that all values then have."""

    def __init__(self, program: Program, large_weight: float) -> None:
        self.program = program
        self.large_weight = large_weight
        self.convolutions: list[fx.Node] = []
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}  # -> the first node that takes it
        self._taken: dict[fx.Node, dict[fx.Node, torch.memory_format]] = {}  # node -> operand -> the format it takes
        self._broadcast: dict[fx.Node, dict[fx.Node, fx.Node]] = {}  # node -> operand -> what expands it for the node
        self._specs: dict[fx.Node, Spec] = {}  # of nodes whose strides change

    @cached_property
    def _mode(self) -> FakeTensorMode:
        """Takes milliseconds to make, and most graphs have no convolution."""
        return FakeTensorMode(allow_non_fake_inputs=True)

    def make(self) -> str | None:
        """Follow the graph in its order. Returns the name of a node that cannot be served, if there is one."""
        for node in self.program.graph.nodes:
            starts = self._begins(node)
            if starts:
                self.convolutions.append(node)
            elif not any(operand in self._specs for operand in node.all_input_nodes):
                continue
            if starts or self._follows(node):
                self._align(node, starts)
                before = info(node).spec
                after = unless_equal(before, self._spec_after(node))
                if after != before:
                    self._specs[node] = after
            elif not self._restore(node):
                return info(node).name
        return None

    def apply(self) -> None:
        program = self.program
        build = Builder(program)
        made: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        for (value, layout), user in self.copies.items():
            spec = laid_out(tensor_spec(value), layout)
            name = f"{info(value).name}/{str(layout).removeprefix('torch.')}"
            # A gradient is reduced as soon as it is there.
            leaves = user is program.output
            with build.after(value) if leaves else build.before(user):
                made[value, layout] = build.call(
                    aten.clone.default,
                    (value,),
                    {"memory_format": layout},
                    spec=spec,
                    like=info(value if leaves else user),
                    name=name,
                )
        for node, layouts in self._taken.items():
            for value, layout in layouts.items():
                node.replace_input_with(value, made[value, layout])
        for node, values in self._broadcast.items():
            for value, expansion in values.items():
                with build.before(value):
                    node.replace_input_with(value, self._as_broadcast(build, value, expansion))
                erase_upwards(program, value)
        kept = self._taken.get(program.output, {})
        for returned in (program.grads, program.aux):
            returned.update({name: made[node, kept[node]] for name, node in returned.items() if node in kept})
        for node, changed in self._specs.items():
            info(node).spec = changed

    def _begins(self, node: fx.Node) -> bool:
        """Whether activations are to enter this convolution channels last."""
        if node.target is not aten.convolution.default or node.args[6] or self._has_large_weight(node):
            return False
        return all(
            len(spec.shape) == 4 and spec.dtype == torch.float32 and spec.device == "cpu" and spec.is_contiguous
            for spec in (tensor_spec(value) for value in node.all_input_nodes[:2])
        )

    def _follows(self, node: fx.Node) -> bool:
        if node.op != "call_function" or written_nodes(node):
            return False
        if node.target in _CONVOLUTIONS:
            return not self._has_large_weight(node)
        return node.target in _FOLLOWING or (is_pointwise(node) and node.target not in _NOT_FOLLOWING)

    def _has_large_weight(self, node: fx.Node) -> bool:
        weight = tensor_spec(_weight_of(node))
        return not is_channels_last(weight) and weight.nbytes > self.large_weight * _activation_bytes(node)

    def _align(self, node: fx.Node, starts: bool) -> None:
        """Kernels of several tensors are fast, and lay out their result plainly, where all are laid out alike."""
        if not starts and not any(is_channels_last(self._specs.get(operand)) for operand in node.all_input_nodes):
            return
        operands = _activations(node) if node.target in _CONVOLUTIONS else node.all_input_nodes
        for operand in operands:
            spec = self._spec(operand)
            if isinstance(spec, TensorSpec) and len(spec.shape) == 4 and not is_channels_last(spec):
                if is_pointwise(node) and (expansion := _expansion(operand)) is not None:
                    self._broadcast.setdefault(node, {})[operand] = expansion
                else:
                    self._take(node, operand, torch.channels_last)

    def _restore(self, node: fx.Node) -> bool:
        """Hand a node its operands as they were. Returns whether that can be done."""
        for operand in node.all_input_nodes:
            if operand in self._specs:
                before = info(operand).spec
                if not isinstance(before, TensorSpec) or not before.is_contiguous:
                    return False
                self._take(node, operand, torch.contiguous_format)
        return True

    def _take(self, node: fx.Node, operand: fx.Node, layout: torch.memory_format) -> None:
        self.copies.setdefault((operand, layout), node)
        self._taken.setdefault(node, {})[operand] = layout

    def _spec(self, node: fx.Node) -> Spec:
        return self._specs.get(node, info(node).spec)

    def _spec_after(self, node: fx.Node) -> Spec:
        """What the node yields, from its operands as the plan lays them out."""
        if node.target is operator.getitem:
            return self._spec(node.args[0])[node.args[1]]  # type: ignore[arg-type, index]
        taken, broadcast = self._taken.get(node, {}), self._broadcast.get(node, {})

        def empty(operand: fx.Node) -> Any:
            if operand in broadcast:
                return tensor_spec(broadcast[operand]).empty()
            spec = self._spec(operand)
            if operand in taken:
                assert isinstance(spec, TensorSpec)
                spec = laid_out(spec, taken[operand])
            return empty_of(spec)

        with known_shapes(), self._mode, torch.no_grad():
            args = fx.node.map_arg(node.args, empty)
            kwargs = fx.node.map_arg(node.kwargs, empty)
            op: Any = node.target
            after = spec_of(op(*args, **kwargs))
        if op is aten.native_group_norm.default and is_channels_last(spec_of(args[0])) and isinstance(after, tuple):
            # As its kernel does. Without data torch 2.14 lays it out plainly.
            maps, *rest = after
            assert isinstance(maps, TensorSpec)
            return (laid_out(maps, torch.channels_last), *rest)
        return after

    def _as_broadcast(self, build: Builder, value: fx.Node, expansion: fx.Node) -> fx.Node:
        """`value` once more, computed before it is expanded: the same numbers, without memory of its size."""
        if value is expansion:
            return value
        small, name = expansion.args[0], info(value).name
        assert isinstance(small, fx.Node)
        assert callable(value.target)
        with known_shapes(), self._mode:
            spec = spec_of(value.target(tensor_spec(small).empty(), *value.args[1:]))
        args = (small, *value.args[1:])
        scaled = build.call(value.target, args, spec=spec, like=info(value), name=f"{name}/scaled")
        args = (scaled, *expansion.args[1:])
        return build.call(
            aten.expand.default, args, spec=info(expansion).spec, like=info(value), name=f"{name}/broadcast"
        )


def _expansion(value: fx.Node) -> fx.Node | None:
    """The node that expands one number per map to the maps that `value` is, scaled or not; None if it is none."""
    source = value.args[0] if value.target in (aten.div.Scalar, aten.mul.Scalar) else value
    if not isinstance(source, fx.Node) or source.target is not aten.expand.default:
        return None
    return source if tensor_spec(source).stride[2:] == (0, 0) else None


def _activations(convolution: fx.Node) -> Sequence[fx.Node]:
    """The activations among the operands of a convolution or of its backward."""
    count = 1 if convolution.target is aten.convolution.default else 2
    return convolution.args[:count]  # type: ignore[return-value]


def _weight_of(convolution: fx.Node) -> fx.Node:
    return convolution.args[len(_activations(convolution))]  # type: ignore[return-value]


def _activation_bytes(convolution: fx.Node) -> int:
    """Bytes of a convolution's input and output."""
    values = (*_activations(convolution), convolution)[:2]
    return sum(tensor_spec(value).nbytes for value in values)
