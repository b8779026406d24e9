"""What a step returns besides its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.lockstep import lockstep


class Metrics(NamedTuple):
    logits: torch.Tensor
    right: torch.Tensor
    rows: int


def loss_and_metrics(out: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    right = (out.argmax(1) == target).sum()
    return F.cross_entropy(out, target), {"all": Metrics(out, right, len(out)), "norm": [out.norm()]}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return F.cross_entropy(out, target), out


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


@pytest.mark.parametrize("options", [{}, {"schedule": "none", "cpu_kernels": False}])
def test_logits_and_metrics_come_out_of_the_same_graph(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=loss_and_metrics, optimizer=sgd, has_aux=True, **options)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for mode in (True, True, False):
        model.train(mode)
        x, target = batch()
        loss, aux = step(x, target)
        expected, wanted = loss_and_metrics(twin(x), target)
        torch.testing.assert_close((loss, aux["all"].logits), (expected, wanted["all"].logits), check_stride=False)
        assert isinstance(aux["all"], Metrics) and aux["all"].rows == 6
        assert torch.equal(aux["all"].right, wanted["all"].right)
        torch.testing.assert_close(aux["norm"][0], wanted["norm"][0])
        assert not any(tensor.requires_grad for tensor in (loss, aux["all"].logits, aux["norm"][0]))
        if mode:
            other.zero_grad()
            expected.backward()
            other.step()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_step_whose_loss_nobody_wants(has_aux: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    x, target = batch()
    loss_fn: Any = loss_and_metrics if has_aux else F.cross_entropy
    calls = []
    for each, wanted in ((model, False), (twin, True)):
        sgd = torch.optim.SGD(each.parameters(), lr=0.1)
        step = cf.compile(each, loss_fn=loss_fn, optimizer=sgd, has_aux=has_aux, return_loss=wanted)
        calls.append(step(x, target))
        loss = each.eval() and step(x, target)
        assert (loss[0] if has_aux else loss).ndim == 0
    if has_aux:
        assert calls[0][0] is None and torch.equal(calls[0][1]["all"].logits, calls[1][1]["all"].logits)
    else:
        assert calls[0] is None and calls[1].ndim == 0
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=0, atol=0)


def test_a_model_that_returns_both_and_nothing_else_to_return() -> None:
    model = OwnLoss()
    x, target = batch()
    step = cf.compile(model, form="step", has_aux=True)
    loss, out = step(x, target)
    torch.testing.assert_close(out, model.layer(x).detach())
    torch.testing.assert_close(model.layer.weight.grad, torch.autograd.grad(model(x, target)[0], model.layer.weight)[0])
    plain = cf.compile(model.layer, loss_fn=lambda out, y: (F.cross_entropy(out, y), None), has_aux=True)
    loss, nothing = plain(x, target)
    assert nothing is None and loss.ndim == 0


def test_the_text_names_them_and_ranks_in_lockstep_agree() -> None:
    model = OwnLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, optimizer=sgd, has_aux=True, device_num=2)
    text = step.lower(*batch()).text()
    assert "# aux: aux\n" in text
    assert lockstep(step.lower(*batch())).disagreement is None


AS_LOSS_FN = r"loss_fn returned a tensor of shape \(\): with has_aux=True it has to return \(loss, anything\)"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m: cf.compile(m, loss_fn=F.cross_entropy, has_aux=True)(*batch()), cf.CaptureError, AS_LOSS_FN),
        (lambda m: cf.compile(m, loss_fn=loss_and_metrics)(*batch()), cf.CaptureError, "has_aux=True"),
        (lambda m: cf.compile(m, has_aux=True), cf.ConfigValueError, "module form"),
        (lambda m: cf.compile(m, return_loss=False), cf.ConfigValueError, "return_loss=False with the module form"),
        (lambda m: cf.compile(m, loss_fn=loss_and_metrics, has_aux=1), cf.ConfigTypeError, "has_aux is 1"),
        (
            lambda m: cf.compile(m, loss_fn=loss_and_metrics, has_aux=True, parallel_mode="semi_auto"),
            cf.NotAvailableError,
            "not available yet",
        ),
    ],
)
def test_errors_say_what_to_return(make: Callable[[nn.Module], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(nn.Linear(4, 3))
