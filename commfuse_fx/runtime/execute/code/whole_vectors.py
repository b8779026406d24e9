"""Fused updates of flat storage on CPUs give the bits that those of each parameter by itself give.

A fused kernel of the CPU works through a tensor in vectors of up to 64 bytes. What is left at its end it computes
element by element, and rounds that otherwise. In flat storage other elements stand at an end. So the kernel gets what
fills whole vectors as one tensor, and each parameter that leaves some elements over as a tensor of its own. All plans
then train to the same bits, however they lay parameters out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program, Segment
from commfuse_fx.ir.updates.updates import is_node_list, update_nodes
from commfuse_fx.runtime.execute.code.bindings import bound

VECTOR = 64
"""Bytes of the largest vector."""

_FUSED = (
    aten._fused_adagrad_.default,
    aten._fused_adam_.default,
    aten._fused_adamw_.default,
    aten._fused_sgd_.default,
)

Stretch = tuple[int, int]
"""Begin and length in elements."""


def in_whole_vectors(
    program: Program, node: fx.Node, kernel: Callable[..., Any] | None = None
) -> Callable[..., Any] | None:
    """What runs in place of a fused update; None where its flat storage ends as its parameters do.

    kernel: what computes the update, by default the op of the node.
    """
    if node.target not in _FUSED or not is_node_list(node.args[0]):
        return None
    owner = next(owner for owner, nodes in enumerate(update_nodes(program)) if node in nodes)
    segments = program.updates[owner].segments
    spec = tensor_spec(node.all_input_nodes[0])
    if spec.device != "cpu" or _holds_parts(program):
        return None  # on other devices all elements are rounded alike; parts of divided parameters are their own ends
    stretches = [_stretches(segment, program, VECTOR // spec.itemsize) for segment in segments]
    if not any(len(each) > 1 for each in stretches):
        return None
    return _Update(kernel or bound(node.target), stretches)


def rounded_otherwise(program: Program) -> list[str]:
    """The parameters of which an update of flat storage rounds some elements otherwise than one of each by itself."""
    found: list[str] = []
    for update, nodes in zip(program.updates, update_nodes(program), strict=True):
        is_fused = any(node.target in _FUSED for node in nodes) and not _holds_parts(program)
        flat = [segment for segment in update.segments if segment.is_flat and not is_fused]
        found += [name for segment in flat for name, _ in segment.members if program.params[name].spec.device == "cpu"]
    return found


def _holds_parts(program: Program) -> bool:
    return any(param.layout for param in program.params.values())


def _stretches(segment: Segment, program: Program, unit: int) -> list[Stretch]:
    """What the kernel gets as tensors of their own. Empty for a parameter by itself."""
    found: list[Stretch] = []
    if not segment.is_flat:
        return found
    whole = 0  # elements at the begin of the segment, or behind the last stretch, that fill vectors
    begin = 0
    for name, offset in segment.members:
        numel = program.params[name].spec.numel
        if numel % unit == 0:
            whole = offset + numel - begin
            continue
        if whole:
            found.append((begin, whole))
        found.append((offset, numel))
        begin, whole = offset + -(-numel // unit) * unit, 0
    if whole:
        found.append((begin, whole))
    return found


class _Update:
    """Calls a fused kernel on stretches of flat tensors."""

    def __init__(self, run: Callable[..., Any], stretches: Sequence[Sequence[Stretch]]) -> None:
        self._run = run
        self._stretches = stretches

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lists = [self._parts(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
        return self._run(*lists, **kwargs)

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        pairs = zip(tensors, self._stretches, strict=True)
        return list(chain.from_iterable(self._parts_of(tensor, stretches) for tensor, stretches in pairs))

    @staticmethod
    def _parts_of(tensor: torch.Tensor, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
        if not stretches:
            return [tensor]
        if tensor.ndim == 0:  # a count of steps
            return [tensor] * len(stretches)
        return [tensor[begin : begin + length] for begin, length in stretches]
