"""Scale all gradients by one number, so that their common norm is at most what clip_grad_norm allows.

Why: docs/decisions.md, "The norm of gradients is that of norms of single parameters".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import WAIT, c10d
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.passes.declaration import Pass, Situation

_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


@dataclass(frozen=True)
class ClipGradients(Pass):
    """What torch.nn.utils.clip_grad_norm_ does to the reduced gradients that the optimizer takes, by the same formula.

    Every rank sums up by itself what all ranks have in common. Where ranks hold other parts of some parameters, one
    all_reduce of one number adds up the squares of the parts.

    `layerwise_group`: the mesh axes along which parameters that are marked layerwise_parallel differ. None: none do.
    """

    name = "clip_gradients"
    numerics = "defines"
    requires = ("reduced",)
    ensures = ("clipped",)

    max_norm: float
    layerwise_group: str | None = None

    @classmethod
    def when(cls, situation: Situation) -> ClipGradients | None:
        config = situation.config
        if config.clip_grad_norm is None or situation.holds_gradients:
            return None
        return cls(
            config.clip_grad_norm, situation.reduced_group if config.parallel_mode == "hybrid_parallel" else None
        )

    def __call__(self, program: Program) -> bool:
        groups = self._by_group(program)
        if not groups:
            return False
        emit = _Emitter(program)
        total = emit.total(groups)
        coefficient = emit.coefficient(total, self.max_norm)
        for name in (name for names in groups.values() for name in names):
            program.grads[name] = emit.clipped(program.grads[name], coefficient, name)
        program.set_output()
        for group, names in groups.items():
            if group:
                reason = f"ranks hold parts of these gradients: the squares of the parts are added up over {group}"
                program.note("clipping", f"{len(names)} parameter(s)", reason)
        return True

    def _by_group(self, program: Program) -> dict[str, list[str]]:
        """The parameters whose gradients the optimizer takes, by the mesh axes along which the gradients differ. "" is
        the first key: those that all ranks have in common."""
        optimizer = program.optimizer
        held = dict.fromkeys(name for group in optimizer.groups for name in group.params) if optimizer else {}
        found: dict[str, list[str]] = {"": []}
        for name in program.grads:
            if name in held:
                found.setdefault(self._group(program, name), []).append(name)
        return {group: names for group, names in found.items() if names}

    def _group(self, program: Program, name: str) -> str:
        param = program.params[name]
        groups = [group for group, placement in param.layout if isinstance(placement, Shard)]
        if param.shard:
            groups.append(param.shard)
        if param.layerwise_parallel and self.layerwise_group is not None:
            groups.append(self.layerwise_group)
        return _joined_axes(program.mesh, groups)


class _Emitter:
    """Writes nodes at the end of the step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.build = Builder(program)
        self.common = None if program.config.parallel_mode == "stand_alone" else ""
        """Along which axes a value differs that ranks have in common: nobody knows where each trains by itself."""

    def total(self, groups: Mapping[str, Sequence[str]]) -> fx.Node:
        """The norm of all gradients together."""
        grads = self.program.grads
        norms = {group: self._of_group(group, [grads[name] for name in names]) for group, names in groups.items()}
        parts = {group: norm for group, norm in norms.items() if group}
        found = [norm for group, norm in norms.items() if not group]
        if parts:
            found.append(self._over_ranks(parts))
        return found[0] if len(found) == 1 else self._joined(found, [tensor_spec(norm) for norm in found], ".all")

    def coefficient(self, norm: fx.Node, max_norm: float) -> fx.Node:
        """max_norm / (norm + 1e-6), as torch divides a number by a tensor, and at most 1."""
        spec = tensor_spec(norm)
        shifted = self._call(aten.add.Tensor, (norm, _EPSILON), spec, "shifted", self.common)
        inverse = self._call(aten.reciprocal.default, (shifted,), spec, "inverse", self.common)
        quotient = self._call(aten.mul.Tensor, (inverse, max_norm), spec, "quotient", self.common)
        return self._call(aten.clamp.default, (quotient, None, 1.0), spec, "coefficient", self.common)

    def clipped(self, grad: fx.Node, coefficient: fx.Node, name: str) -> fx.Node:
        """The gradient times the coefficient, in its own dtype."""
        spec, varies = tensor_spec(grad), info(grad).varies
        dtype = spec.dtype if spec.shape else torch.promote_types(spec.dtype, tensor_spec(coefficient).dtype)
        args = (grad, coefficient)
        made = self._call(aten.mul.Tensor, args, dense_like(spec).with_dtype(dtype), f"clipped.{name}", varies)
        return made if dtype == spec.dtype else self._cast(made, spec.dtype, f"clipped.{name}.cast", varies)

    def _of_group(self, group: str, grads: Sequence[fx.Node]) -> fx.Node:
        """The norm of what a rank holds of these gradients."""
        specs = tuple(TensorSpec((), spec.dtype.to_real(), (), spec.device) for spec in map(tensor_spec, grads))
        args, label = (list(grads), 2), _label(group)
        norms = self._call(aten._foreach_norm.Scalar, args, specs, f"norms{label}", group or self.common)
        return self._joined(norms, specs, label, group)

    def _joined(self, norms: Any, specs: Sequence[TensorSpec], label: str, group: str = "") -> fx.Node:
        """The norm of norms."""
        dtype = reduce(torch.promote_types, (spec.dtype for spec in specs))
        stacked = TensorSpec((len(specs),), dtype, (1,), specs[0].device)
        vector = self._call(aten.stack.default, (norms,), stacked, f"stacked{label}", group or self.common)
        args = (vector, 2)
        spec = TensorSpec((), dtype, (), stacked.device)
        return self._call(aten.linalg_vector_norm.default, args, spec, f"norm{label}", group or self.common)

    def _over_ranks(self, norms: Mapping[str, fx.Node]) -> fx.Node:
        """The norm of all parts together, of these norms of a rank's parts by the axes along which the parts differ.

        One all_reduce over all of these axes: where ranks along some have the same part, each adds its share.
        """
        mesh = self.program.mesh
        group = _joined_axes(mesh, norms)
        squares = [self._square(norm, each, mesh.size(each) / mesh.size(group)) for each, norm in norms.items()]
        dtype = reduce(torch.promote_types, (tensor_spec(square).dtype for square in squares))
        spec, label = tensor_spec(squares[0]).with_dtype(dtype), _label(group)
        square = squares[0]
        for number, other in enumerate(squares[1:], 1):
            square = self._call(aten.add.Tensor, (square, other), spec, f"squares{label}.{number}", group)
        collective = CollectiveInfo(
            "all_reduce",
            group=group,
            dtype=dtype,
            nbytes=spec.nbytes,
            members=(info(square).name,),
            sequence=len(self.program.params),
            reduce_op="sum",
            role="norm",
        )
        args = (square, "sum", group)
        start = self._call(c10d.all_reduce.default, args, spec, f"all_reduce{label}", None, collective=collective)
        wait = self._call(WAIT, (start,), spec, f"wait{label}", self.common)
        return self._call(aten.sqrt.default, (wait,), spec, f"root{label}", self.common)

    def _square(self, norm: fx.Node, group: str, share: float) -> fx.Node:
        """This rank's share of the square of a norm, in single precision at least."""
        label, dtype = _label(group), torch.promote_types(tensor_spec(norm).dtype, torch.float32)
        if dtype != tensor_spec(norm).dtype:
            norm = self._cast(norm, dtype, f"norm{label}.cast", group)
        square = self._call(aten.pow.Tensor_Scalar, (norm, 2), tensor_spec(norm), f"square{label}", group)
        if share == 1:
            return square
        return self._call(aten.mul.Tensor, (square, share), tensor_spec(norm), f"square{label}.share", group)

    def _cast(self, value: fx.Node, dtype: torch.dtype, name: str, varies: str | None) -> fx.Node:
        spec = tensor_spec(value).with_dtype(dtype)
        return self._call(aten._to_copy.default, (value,), spec, name, varies, {"dtype": dtype})

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        spec: Spec,
        name: str,
        varies: str | None,
        kwargs: dict[str, Any] | None = None,
        collective: CollectiveInfo | None = None,
    ) -> fx.Node:
        with self.build.before(self.program.output):
            return self.build.call(
                target,
                args,
                kwargs,
                spec=spec,
                like=NodeInfo("update"),
                name=f"update/{name}",
                varies=varies,
                collective=collective,
            )


def _joined_axes(mesh: Mesh, groups: Iterable[str]) -> str:
    """All axes of these groups that have several ranks, in the order of the mesh."""
    axes = [axis for group in groups for axis in group.split(",")]
    return ",".join(axis for axis in mesh.names if axis in axes and mesh.size(axis) > 1)


def _label(group: str) -> str:
    """What the names of nodes say of the axes along which values differ."""
    return f".{group.replace(',', '+')}" if group else ""
