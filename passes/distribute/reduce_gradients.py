"""Insert the reduction of every gradient over the data-parallel group.

Why: docs/decisions.md, "Where the caller starts the backward, both halves are one graph".
Why: docs/decisions.md, "Each gradient that is used is reduced once".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d, collective_of
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.meta import CollectiveInfo, dtype_name, info, tensor_spec
from commfuse_fx.ir.core.order import stable_sort
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.ir.ops.gradients import end_of_backward, separate_gradients
from commfuse_fx.passes.declaration import Pass, Situation

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ReduceGradients(Pass):
    """`mean`: average instead of sum. `fp32`: low-precision gradients are reduced in fp32 and cast back.

    `honour_layerwise`: leave out parameters marked layerwise_parallel. A group of None or of one rank
    reduces nothing; gradients that share memory are separated all the same. `in_order`: starts stand in the order of
    the parameters, the last one first, each behind its gradient.
    """

    name = "reduce_gradients"
    numerics = "defines"
    requires = ("simplified",)
    ensures = ("reduced",)

    group: str | None
    mean: bool = True
    fp32: bool = True
    honour_layerwise: bool = False
    in_order: bool = False

    @classmethod
    def when(cls, situation: Situation) -> ReduceGradients | None:
        config = situation.config
        if situation.divides or situation.gradients == "given":
            return None
        return cls(
            situation.scattered_group,
            mean=config.gradients_mean,
            fp32=config.gradient_fp32_sync,
            honour_layerwise=config.parallel_mode == "hybrid_parallel",
            in_order=situation.in_order,
        )

    def __call__(self, program: Program) -> bool:
        if not program.grads:
            return False
        build = Builder(program)
        modified = False
        for grad, names in self._groups(program):
            wanted = [name for name in names if self._wants_reduction(program, name)]
            if wanted and tensor_spec(grad).numel:
                reduced = self._reduce(build, grad, wanted)
                program.grads.update(dict.fromkeys(wanted, reduced))
                modified = True
        modified = separate_gradients(build) or modified
        program.set_output()
        if self.in_order:
            _chain_starts(program)
        return modified

    def _groups(self, program: Program) -> list[tuple[fx.Node, list[str]]]:
        """The gradients to reduce, in this order, and the parameters that each belongs to."""
        if self.in_order:
            return [(grad, [name]) for name, grad in reversed(program.grads.items())]
        shared = _names_by_gradient(program)
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        return [(grad, shared[grad]) for grad in sorted(shared, key=position.__getitem__)]

    def _wants_reduction(self, program: Program, name: str) -> bool:
        if self.group is None or program.mesh.size(self.group) == 1:
            return False
        if self.honour_layerwise and program.params[name].layerwise_parallel:
            program.note("not reduced", name, "it is marked layerwise_parallel")
            return False
        return True

    def _reduce(self, build: Builder, grad: fx.Node, names: list[str]) -> fx.Node:
        """The start stands right after the gradient, its wait at the end of the backward."""
        assert self.group is not None
        spec = tensor_spec(grad)
        wire = torch.float32 if self.fp32 and spec.dtype in _LOW_PRECISION else spec.dtype
        name = names[0]
        value = grad
        if wire != spec.dtype:
            with build.after(grad):
                value = build.cast(grad, wire, f"reduce/{name}/{dtype_name(wire)}")
        param = build.program.params[name]
        op = "avg" if self.mean else "sum"
        wire_spec = dense_like(tensor_spec(value))
        collective = CollectiveInfo(
            "all_reduce",
            group=self.group,
            dtype=wire,
            nbytes=wire_spec.nbytes,
            members=tuple(names),
            sequence=param.sequence,
            reduce_op=op,
            fusion_id=param.fusion_id,
            role="gradient",
        )
        with build.after(value):
            start = build.call(
                c10d.all_reduce.default,
                (value, op, self.group),
                spec=wire_spec,
                like=info(grad),
                name=f"reduce/{name}/all_reduce",
                collective=collective,
                phase="backward",
            )
        with build.before(end_of_backward(build.program)):
            result = build.wait(start, f"reduce/{name}/wait")
            if wire != spec.dtype:
                result = build.cast(result, spec.dtype, f"reduce/{name}/{dtype_name(spec.dtype)}")
        return result


def _chain_starts(program: Program) -> None:
    """What is sent stands in one order, whatever the order of compute: first what is no gradient."""
    starts = [node for node in program.collectives() if info(node).phase == "backward"]
    gradients = [node for node in starts if collective_of(node).role == "gradient"]
    numbers = {name: i for i, name in enumerate(program.params)}
    gradients.sort(key=lambda node: -numbers[collective_of(node).members[0]])
    chain = [*(node for node in starts if collective_of(node).role != "gradient"), *gradients]
    before = {node: list(others) for node, others in Dependence(program.graph, program.aliases()).direct.items()}
    for first, second in pairwise(chain):
        before[second].append(first)
    stable_sort(program.graph, {node: i for i, node in enumerate(program.graph.nodes)}, before)


def _names_by_gradient(program: Program) -> dict[fx.Node, list[str]]:
    """One node can be the gradient of several parameters (of a and b in a + b): it is reduced once."""
    shared: dict[fx.Node, list[str]] = {}
    for name, grad in program.grads.items():
        shared.setdefault(_uncopied(grad), []).append(name)
    return shared


def _uncopied(grad: fx.Node) -> fx.Node:
    """Autograd copies a gradient that it hands to a second parameter; reducing one of the two is enough."""
    while grad.target in (aten.copy.default, aten.clone.default):
        value = grad.args[1 if grad.target is aten.copy.default else 0]
        if not isinstance(value, fx.Node) or info(value).spec != info(grad).spec:
            break
        grad = value
    return grad
