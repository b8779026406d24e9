"""Losses: negative log-likelihood, and those that compare two tensors element by element.

Reduction "mean" divides by a count of the whole batch; decompose.py writes it as a sum and a division, so the rules
here know "none" (0) and "sum" (2) only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.functions import pure
from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.decompose import ELEMENTWISE_LOSSES, ELEMENTWISE_LOSSES_BACKWARD
from commfuse_fx.sharding.rules.writing.named import (
    on_contiguous,
    operand_placement,
    spec_of_argument,
    strategy,
    subdivided,
)
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The numbers of at::Reduction."""


def _own_targets(
    target: torch.Tensor, classes: int, ignore_index: int, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the targets in this rank's classes (0 where they are elsewhere), and where they are here."""
    local = target - index * classes
    inside = (local >= 0) & (local < classes) & (target != ignore_index)
    return torch.where(inside, local, 0), inside


def _weights_of(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, like: torch.Tensor
) -> torch.Tensor:
    """The weight of every target, 0 for ignored ones."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(like.dtype)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0)


@pure
def nll_loss_of_classes(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    dim: int,
    index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of the targets that fall into this rank's classes, which lie along `dim` of x; others count as 0.

    The second result is the total weight of all targets: they and the weights are whole.
    """
    position, inside = _own_targets(target, x.shape[dim], ignore_index, index)
    picked = x.gather(dim, position.unsqueeze(dim)).squeeze(dim)
    weights = _weights_of(target, weight, ignore_index, x)
    loss = torch.where(inside, -picked * weights, 0)
    if reduction == NONE and x.dim() > 1:
        return loss, x.new_zeros(())
    return loss.sum(), weights.sum()


@pure
def nll_loss_gradient_of_classes(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    dim: int,
    index: int,
) -> torch.Tensor:
    """Gradient with respect to this rank's classes."""
    position, inside = _own_targets(target, x.shape[dim], ignore_index, index)
    weights = _weights_of(target, weight, ignore_index, x)
    value = torch.where(inside, -weights * grad, 0)
    return torch.zeros_like(x).scatter(dim, position.unsqueeze(dim), value.unsqueeze(dim))


def _class_dim(call: OpCall) -> int:
    spec = spec_of_argument(call, "self")
    assert spec is not None
    return 0 if len(spec.shape) == 1 else 1


def _batch_dims(call: OpCall) -> list[tuple[Placement, Placement]]:
    """Ways to divide what is not classes: placements of the input, and of the targets."""
    spec = spec_of_argument(call, "self")
    assert spec is not None
    dims = [d for d in range(len(spec.shape)) if d != _class_dim(call)]
    return [(S(d), S(d if d < 1 else d - 1)) for d in dims]


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(call: OpCall) -> Sequence[Strategy]:
    bound, dim = call.bound(), _class_dim(call)
    reduction = bound["reduction"]
    if reduction == MEAN:
        return []
    found: list[Strategy] = []
    for own, targets in _batch_dims(call):
        outputs = (P, P) if reduction == SUM else (targets, R)
        found.append(strategy(call, {"self": own, "target": targets}, outputs))
    names = ("self", "target", "weight", "reduction", "ignore_index")
    step = Step(nll_loss_of_classes, (*(bound[name] for name in names), dim, INDEX))
    return [*found, strategy(call, {"self": S(dim)}, (P, R), [step])]


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: OpCall) -> Sequence[Strategy]:
    """Only the mean uses the total weight: otherwise it may be a partial sum."""
    bound, dim = call.bound(), _class_dim(call)
    reduction = bound["reduction"]
    if reduction == MEAN:
        return []
    found: list[Strategy] = []
    names = ("grad_output", "self", "target", "weight", "ignore_index")
    step = Step(nll_loss_gradient_of_classes, (*(bound[name] for name in names), dim, INDEX))
    for unused in (P, R):
        for own, targets in _batch_dims(call):
            grad = targets if reduction == NONE else R
            placed = {"grad_output": grad, "self": own, "target": targets, "total_weight": unused}
            found.append(strategy(call, placed, (own,), on_contiguous(call, ("self",))))
        found.append(strategy(call, {"self": S(dim), "total_weight": unused}, (S(dim),), [step]))
    return found


def _placed_at(call: OpCall, placed: Sequence[tuple[object, Placement]]) -> tuple[Placement, ...]:
    """Placements of the inputs, from those of arguments; what is no tensor is left out."""
    inputs: list[Placement] = [R] * len(call.inputs)
    for argument, placement in placed:
        if isinstance(argument, Ref):
            inputs[argument.index] = placement
    return tuple(inputs)


@rule(nll_loss_of_classes)
def nll_loss_of_classes_again(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis."""
    x, target, weight, reduction, ignore_index, dim, index = call.args
    found: list[Strategy] = []
    for d in (d for d in range(len(call.inputs[x.index].shape)) if d != dim):
        targets = S(d if d < dim else d - 1)
        outputs = (P, P) if reduction == SUM else (targets, R)
        found.append(Strategy(outputs, _placed_at(call, [(x, S(d)), (target, targets)])))
    own = Step(nll_loss_of_classes, (x, target, weight, reduction, ignore_index, dim, Result(0)))
    steps = (subdivided(index, call.ways), own)
    return [*found, Strategy((P, R), _placed_at(call, [(x, S(dim))]), steps)]


@rule(nll_loss_gradient_of_classes)
def nll_loss_gradient_of_classes_again(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis. `grad` is one number, or one per target."""
    grad, x, target, weight, ignore_index, dim, index = call.args
    found: list[Strategy] = []
    for d in (d for d in range(len(call.inputs[x.index].shape)) if d != dim):
        targets = S(d if d < dim else d - 1)
        of_grad: Placement = targets if call.inputs[grad.index].shape else R
        found.append(Strategy((S(d),), _placed_at(call, [(grad, of_grad), (x, S(d)), (target, targets)])))
    own = Step(nll_loss_gradient_of_classes, (grad, x, target, weight, ignore_index, dim, Result(0)))
    steps = (subdivided(index, call.ways), own)
    return [*found, Strategy((S(dim),), _placed_at(call, [(x, S(dim))]), steps)]


@rule(*ELEMENTWISE_LOSSES, *ELEMENTWISE_LOSSES_BACKWARD)
def elementwise_loss(call: OpCall) -> Sequence[Strategy]:
    """Any dimension of the operands, which broadcast."""
    bound = call.bound()
    reduction = bound["reduction"]
    if reduction == MEAN:
        return []
    backward = "grad_output" in bound
    names = [name for name in bound if spec_of_argument(call, name) is not None]
    compared = [name for name in names if name != "grad_output"]
    shape = torch.broadcast_shapes(*(call.inputs[bound[name].index].shape for name in compared))
    found: list[Strategy] = []
    for d in range(len(shape)):
        placed = {name: operand_placement(d, spec_of_argument(call, name), shape) for name in names}
        if backward and reduction == SUM:
            placed["grad_output"] = R
        if all(placed[name] == R for name in compared):
            continue
        output = P if reduction == SUM and not backward else S(d)
        found.append(strategy(call, placed, (output,)))
    return found
