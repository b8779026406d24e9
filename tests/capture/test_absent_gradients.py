"""The backward of a module of which the loss uses only some outputs is that which autograd would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import commfuse_fx as cf
from commfuse_fx.capture.outputs.absent_gradients import leave_out
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor
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


class Twice(torch.autograd.Function):
    """Its backward is not linear in the second of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        first, second = gradients
        result: torch.Tensor = first * 2 + second.exp()
        return result


class SecondOnly(Twice):
    """Its backward looks at the second gradient only."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        result: torch.Tensor = gradients[1].exp()
        return result


class GetsNone(Twice):
    """It gets None in place of a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2


class Pair(torch.autograd.Function):
    """It hands each gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, y * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = gradients
        return first, second


class Calls(nn.Module):
    """A model that is one expression."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))
        self.v = nn.Parameter(torch.arange(3.0) + 1)
        self.code = compile(text, __file__, "eval")

    def forward(self) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = eval(self.code, globals() | {"w": self.w, "v": self.v})
        return result


OUTPUTS = [
    "(Square.apply(w * 1), w * 5)",
    "Twice.apply(w)",
    "SecondOnly.apply(w)",
    "[each.sum() for each in Twice.apply(w)]",  # the gradient of a sum is an expanded one
    "[each + 1 for each in Twice.apply(w * 1)]",
    "(Twice.apply(w)[0], w * 5)",
    "torch._foreach_mul(list(Twice.apply(w)), 2.0)",
    "[Twice.apply(each)[i] for i, each in enumerate(Twice.apply(w))]",
    "Pair.apply(w, v)",
    "[Pair.apply(w, v)[0] * v, w * 3]",
    "torch.utils.checkpoint.checkpoint(lambda x: Twice.apply(x * 2), w * 1, use_reentrant=True)",
    "torch.utils.checkpoint.checkpoint(lambda x: Twice.apply(x * 2), w * 1, use_reentrant=False)",
]


@pytest.mark.parametrize("text", OUTPUTS)
def test_functions_get_zeros_or_are_not_run(text: str) -> None:
    for used in [(0,), (1,), (0, 1)]:
        eager, model = Calls(text), Calls(text)
        for form, outputs in ((eager, eager()), (model, cf.compile(model)())):
            torch.autograd.backward([(outputs[i] * torch.ones(3)).sum() for i in used])
            assert form.w.grad is not None
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


class Changes(Twice):
    """Its backward changes the gradients themselves."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        first, second = gradients
        return first.mul_(2) + second.exp_()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_backward_may_change_its_gradients_in_place(used: tuple[int, ...]) -> None:
    eager, model = Calls("Changes.apply(w)"), Calls("Changes.apply(w)")
    for outputs in (eager(), cf.compile(model)()):
        torch.autograd.backward([outputs[i] for i in used], [torch.ones(3) for _ in used])
    assert model.w.grad is not None and eager.w.grad is not None and torch.equal(model.w.grad, eager.w.grad)


def test_a_function_that_would_get_none_is_refused() -> None:
    model = Calls("GetsNone.apply(w)")
    with pytest.raises(cf.CaptureError, match=r"test_absent_gradients\.py:\d+ calls set_materialize_grads\(False\)"):
        cf.compile(model)()[0].sum().backward()
    assert model.w.grad is None
    sum(cf.compile(model)()).sum().backward()
    assert model.w.grad is not None


def test_zeros_do_not_stand_for_a_function_that_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = cf.compile(Calls(OUTPUTS[0]))()
    monkeypatch.setattr(HalvesExecutor, "places_in", lambda self, names: None)
    with pytest.raises(cf.CaptureError, match=r"test_absent_gradients\.py:\d+ has no part in this backward"):
        outputs[1].sum().backward()


class Hooked(nn.Module):
    """A hook puts another gradient in the place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = self.weight * 2
        doubled.register_hook(lambda gradient: torch.ones(3))
        return doubled.sum(), (self.weight * 5).sum()


@pytest.mark.parametrize("used", [0, 1])
def test_a_gradient_that_follows_from_no_output_is_refused(used: int) -> None:
    model = Hooked()
    outputs = cf.compile(model)()
    with pytest.raises(cf.CaptureError, match=r"test_absent_gradients\.py:\d+ follows from the gradient of no output"):
        outputs[used].backward()
    assert model.weight.grad is None
    sum(cf.compile(model)()).backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.full((3,), 7.0))


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


@pytest.mark.parametrize("used, gradient", [(0, 3.0), (1, 5.0)])
def test_results_of_a_function_that_nothing_uses(used: int, gradient: float) -> None:
    model = Calls("(Both.apply(w * 1)[1].sum(), (w * 5).sum())")
    cf.compile(model)()[used].backward()
    assert model.w.grad is not None and torch.equal(model.w.grad, torch.full((3,), gradient))
