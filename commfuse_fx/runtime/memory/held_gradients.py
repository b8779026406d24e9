"""What micro-batches leave of gradients for the one that updates.

Why: docs/decisions.md, "Sums of micro-batches are written at the end of a call, and lie beside the parameters".
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.meta import TensorSpec, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_owners import holds_of_owner


class HeldGradients:
    """One tensor for each parameter: the sum of the gradients of the micro-batches since the last update.

    All graphs of a step on one rank share them.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[weakref.ref[nn.Parameter], torch.Tensor]] = {}

    def of(self, name: str, param: nn.Parameter, spec: TensorSpec) -> torch.Tensor:
        """What is held of this parameter, in this layout. Of one that has nothing yet, zeros."""
        owner, found = self._held.get(name, (None, None))
        is_its_own = owner is not None and owner() is param and found is not None and found.shape == spec.shape
        if is_its_own and found is not None and TensorSpec.of(found) == spec:
            return found
        if owner is not None and owner() is param and found is not None and not is_its_own and bool(found.any()):
            raise CaptureError(
                f"earlier micro-batches have left a sum of shape {list(found.shape)} for the gradient of {name}, and "
                f"this one takes one of shape {list(spec.shape)}: give all micro-batches of an update batches of one "
                "size, or call step.drop_micro_batches() to forget the gradients since the last update"
            )
        made = spec.empty()
        with torch.no_grad():
            if is_its_own and found is not None:
                made.copy_(found)
            else:
                made.zero_()
        self.put(name, param, made)
        return made

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is held, by parameter name."""
        return {name: tensor for name, (_, tensor) in self._held.items()}

    def put(self, name: str, param: nn.Parameter, tensor: torch.Tensor) -> None:
        """Hold this tensor for a parameter."""
        self._held[name] = weakref.ref(param), tensor

    def clear(self) -> None:
        """Begin with zeros."""
        if tensors := [tensor for _, tensor in self._held.values()]:
            with torch.no_grad():
                torch._foreach_zero_(tensors)


def specs_of_held(program: Program, rank: int) -> dict[str, TensorSpec]:
    """What this rank holds of the gradient of each parameter: of one that another rank owns, none of its rows."""
    found: dict[str, TensorSpec] = {}
    for node, source in program.sources.items():
        if source.kind != "gradient":
            continue
        name, spec = source.name.removesuffix(".grad"), tensor_spec(node)
        param = program.params.get(name)
        if param is not None and holds_of_owner(node) and program.mesh.index(param.shard, rank) != param.owner:
            spec = spec.with_shape((0, *spec.shape[1:]))
        found[name] = spec
    return found
