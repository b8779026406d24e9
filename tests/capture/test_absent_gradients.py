"""The backward of a module of which the loss uses only some outputs is that which autograd would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.capture.absent_gradients import leave_out
from commfuse_fx.ir.program import Program
from commfuse_fx.testing import assert_pass, parse_program

MODULE = """
    in  %w: f32[2,2] = parameter
    in  %v: f32[2,2] = parameter
    fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %w)
    fwd %/mul.1: f32[2,2] = aten.mul.Tensor(%w, %v)
    fwd %outputs: (f32[2,2], f32[2,2]) = hand_over([%/mul.0, %/mul.1])
    bwd %output.0.grad: f32[2,2] = getitem(%outputs, 0)
    bwd %output.1.grad: f32[2,2] = getitem(%outputs, 1)
    bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%output.0.grad, %w)
    bwd %/grad.mul.1: f32[2,2] = aten.mul.Tensor(%output.1.grad, %v)
    bwd %/grad.mul.2: f32[2,2] = aten.mul.Tensor(%output.1.grad, %w)
    bwd %/grad.add.0: f32[2,2] = aten.add.Tensor(%/grad.mul.0, %/grad.mul.1)
    bwd %/grad.cat.0: f32[4,2] = aten.cat([%/grad.mul.0, %/grad.mul.1])
    bwd %/grad.sum.0: f32[2] = aten.sum.dim_IntList(%/grad.cat.0, [0])
    bwd %/grad.add.1: f32[2,2] = aten.add.Tensor(%/grad.add.0, %/grad.sum.0)
    return [%outputs, %/grad.add.1, %/grad.mul.2]
"""


def without(*outputs: int) -> Callable[[Program], bool]:
    def apply(program: Program) -> bool:
        leave_out(program, outputs)
        return True

    return apply


def test_a_sum_loses_a_term_and_other_ops_get_zeros() -> None:
    program = assert_pass(
        MODULE,
        without(1),
        """
        in  %w: f32[2,2] = parameter
        in  %v: f32[2,2] = parameter
        fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %w)
        fwd %/mul.1: f32[2,2] = aten.mul.Tensor(%w, %v)
        fwd %outputs: (f32[2,2], f32[2,2]) = hand_over([%/mul.0, %/mul.1])
        bwd %output.0.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%output.0.grad, %w)
        bwd %/grad.mul.1/zero/memory: f32[2,2] = aten.empty_strided([2, 2], [2, 1], dtype=f32, device=cpu)
        bwd %/grad.mul.1/zero: f32[2,2] = aten.zero_(%/grad.mul.1/zero/memory)
        bwd %/grad.cat.0: f32[4,2] = aten.cat([%/grad.mul.0, %/grad.mul.1/zero])
        bwd %/grad.sum.0: f32[2] = aten.sum.dim_IntList(%/grad.cat.0, [0])
        bwd %/grad.add.1: f32[2,2] = aten.add.Tensor(%/grad.mul.0, %/grad.sum.0)
        return [%outputs, %/grad.add.1]
        """,
    )
    assert [*program.grads] == ["w"]


@pytest.mark.parametrize(("absent", "left"), [((0,), ["w", "v"]), ((0, 1), [])])
def test_parameters_that_nothing_reaches_have_no_gradient(absent: tuple[int, ...], left: list[str]) -> None:
    program = parse_program(MODULE)
    leave_out(program, absent)
    assert [*program.grads] == left


class Square(torch.autograd.Function):
    """Its backward does not look at the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        square: torch.Tensor = Square.apply(self.weight * 1)  # type: ignore[no-untyped-call]
        return square, (self.weight * 5).sum()


@pytest.mark.parametrize("used", [0, 1])
def test_a_gradient_that_follows_from_no_output_is_refused(used: int) -> None:
    model = Losses()
    outputs = cf.compile(model)()
    with pytest.raises(cf.CaptureError, match=r"test_absent_gradients\.py:\d+ follows from the gradient of no output"):
        outputs[used].backward()
    assert model.weight.grad is None
    sum(cf.compile(model)()).backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, 2 * torch.arange(3.0) + 5)


class Both(torch.autograd.Function):
    """It has two results, and multiplies with their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.square(), x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        (x,), (first, second) = ctx.saved_tensors, gradients
        return first * 2 * x + second * 3


class OneOfBoth(Losses):
    """Nothing uses the first result, for which autograd gives the function zeros."""

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = Both.apply(self.weight * 1)  # type: ignore[no-untyped-call]
        return both[1].sum(), (self.weight * 5).sum()


@pytest.mark.parametrize("used, gradient", [(0, 3.0), (1, 5.0)])
def test_results_of_a_function_that_nothing_uses(used: int, gradient: float) -> None:
    model = OneOfBoth()
    cf.compile(model)()[used].backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.full((3,), gradient))
