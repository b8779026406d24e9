"""Changes in place that torch makes functional wrongly are made right, or refused where the model does them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf


class Changed(nn.Module):
    """change: gets a tensor of shape (4, 6) that is no leaf, and changes it."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))
        self._change = change

    def forward(self) -> torch.Tensor:
        value = self.weight * 2
        self._change(value)
        return (value * torch.arange(24.0).reshape(4, 6)).sum()


def outcome(model: Changed, call: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    model.weight.grad = None
    loss = call()
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), model.weight.grad]


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one tensor twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "parts that overlap": lambda x: torch._foreach_mul_([x[:3], x[1:]], [2.0, 3.0]),
    "overlap, one factor": lambda x: torch._foreach_mul_([x[:3], x[1:]], torch.tensor(2.0)),
    "parts with gaps": lambda x: torch._foreach_add_([x[:, 0], x[:, 2]], 1.0),
    "resized as it is": lambda x: x.detach().view(6, 4).t().resize_(4, 6).index_fill_(0, torch.tensor([1]), 0.5),
    "blocks of unfold": lambda x: x.unfold(0, 2, 2).mul_(3.0),
    "diagonal": lambda x: x.diagonal().fill_(3.0),
    "list whose results are read": lambda x: torch._foreach_exp_([x]),
    "list that is read before": lambda x: (x + 1, torch._foreach_mul_([x], 2.0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_change_is_that_of_eager_execution(change: Callable[[torch.Tensor], Any]) -> None:
    model = Changed(change)
    step = cf.compile(model, form="step")
    torch.testing.assert_close(outcome(model, step), outcome(model, model))


def transposed_first(x: torch.Tensor) -> Any:
    return x.t_().mul_(torch.arange(4.0))


def transposed_part(x: torch.Tensor) -> Any:
    x.add_(1)
    return x.view(6, 4)[1:].t_().sum(0).mul_(2)


@pytest.mark.parametrize("change", [transposed_first, transposed_part])
def test_turned_tensor_is_used(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Changed(lambda x: x.add_(change(x * 1).sum()))
    torch.testing.assert_close(outcome(model, cf.compile(model, form="step")), outcome(model, model))


def turned_after_its_view(x: torch.Tensor) -> Any:
    square = x[:, :4] * 1
    rows = square[:, :]
    square.t_()
    return x.add_((rows * torch.arange(4.0)).sum())


@torch.library.custom_op("commfuse_test::halve_", mutates_args=("x",))
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


def strided_twice(x: torch.Tensor) -> Any:
    return x.as_strided((4, 3), (6, 1)).as_strided((2, 2), (6, 1)).mul_(2.0)


SHARED = "sees some elements several times or not at all"
TURNED = "turns a tensor in place that shares memory with a view"


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "row of an expanded tensor": (lambda x: x[0].expand(3, 6)[1].add_(1.0), SHARED),
    "all of an expanded tensor": (lambda x: x[:1].expand(3, 6).fill_(1.0), SHARED),
    "windows that overlap": (lambda x: x.unfold(0, 2, 1)[0].zero_(), SHARED),
    "windows with a rest": (lambda x: x.unfold(0, 3, 3).mul_(2.0), SHARED),
    "strides that overlap": (lambda x: x.as_strided((3, 2), (1, 1)).fill_(1.0), SHARED),
    "a view is turned, and then changed": (lambda x: x[:, :4].t_().mul_(torch.arange(4.0)), TURNED),
    "a view of another shape is turned": (lambda x: x[::2].t_().add_(1.0), TURNED),
    "a tensor is turned after its view": (turned_after_its_view, TURNED),
    "strides of strides": (strided_twice, "as_strided of another view"),
    "an op of the user's": (lambda x: halve_(x.detach()), "followed for torch's own ops only"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED.keys())
def test_change_is_refused(change: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(cf.CaptureError, match=rf"test_changes_in_place\.py:\d+: (aten|commfuse_test)\..*{message}"):
        cf.compile(Changed(change), form="step")()


def test_a_result_of_another_shape_is_refused() -> None:
    """torch 2.15 says so itself while it traces."""
    with pytest.raises(RuntimeError, match=r"\(4, 1\) in place, but .* \(4, 6\)|\[4, 1\].* broadcast shape \(4, 6\)"):
        cf.compile(Changed(lambda x: x.mean(1, keepdim=True).atan2_(x)), form="step")()


def listed(x: torch.Tensor) -> torch.Tensor:
    squared = x * x
    torch._foreach_mul_([x, squared], [2.0, 3.0])
    return squared


def part_of_listed(x: torch.Tensor) -> torch.Tensor:
    sine = x.sin()
    torch._foreach_zero_([x[0]])
    return sine


def alone(x: torch.Tensor) -> torch.Tensor:
    return x.exp().add_(1.0)


class Returned(Changed):
    def forward(self) -> torch.Tensor:
        value: torch.Tensor = self._change(self.weight * 1)
        return value.sum()


@pytest.mark.parametrize("change", [listed, part_of_listed, alone])
def test_values_that_the_backward_reads_are_not_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As autograd refuses it; the error names the line."""
    text = "has been modified by an inplace operation"
    model = Returned(change)
    with pytest.raises(RuntimeError, match=text):
        model().backward()
    with pytest.raises(RuntimeError, match=rf"(?s){text}.*changed in place by .*test_changes_in_place\.py:\d+"):
        cf.compile(model, form="step")()
    with pytest.raises(RuntimeError, match=rf"(?s){text}.*changed in place by .*test_changes_in_place\.py:\d+"):
        cf.compile(model)()
