"""`tensor.data = other` between two steps, with another shape: strides and dtype may stay what they were."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, 6))
        self.table = nn.Embedding(9, 6)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weighted = (x @ self.rows.t()) * self.get_buffer("scale").sum()
        return weighted.sum(1) + self.table.weight.sum()


def _fewer_rows(net: Net) -> None:
    net.rows.data = net.rows.data[:2]


def _fewer_columns(net: Net) -> None:
    net.rows.data = net.rows.data[:, :5].clone()


def _larger_table(net: Net) -> None:
    net.table.weight.data = torch.cat([net.table.weight.data, torch.ones(3, 6)])


def _longer_buffer(net: Net) -> None:
    net.get_buffer("scale").data = torch.full((7,), 0.5)


@pytest.mark.parametrize("whole_step", [True, False])
@pytest.mark.parametrize("change", [_fewer_rows, _fewer_columns, _larger_table, _longer_buffer])
def test_another_shape_traces_again(
    change: Callable[[Net], None], whole_step: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = Net()
    step = cf.compile(
        net, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3) if whole_step else None
    )
    x, y = torch.randn(3, 6), torch.randn(3)
    step(x, y)
    net.zero_grad()
    change(net)
    x = x[:, : net.rows.shape[1]]
    eager = Net()
    eager.rows = nn.Parameter(net.rows.detach().clone())
    eager.table.weight = nn.Parameter(net.table.weight.detach().clone())
    eager.scale = net.get_buffer("scale").clone()
    sgd = torch.optim.SGD(eager.parameters(), lr=1e-3)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for _ in range(2):
            want = F.mse_loss(eager(x), y)
            torch.testing.assert_close(step(x, y), want.detach())
            sgd.zero_grad()
            want.backward()
            if whole_step:
                sgd.step()
            else:
                for name, param in net.named_parameters():
                    torch.testing.assert_close(param.grad, eager.get_parameter(name).grad)
                net.zero_grad()
    for name, param in net.named_parameters():
        torch.testing.assert_close(param, eager.get_parameter(name))
    assert "the shape, the dtype or the strides of a parameter or buffer changed" in caplog.text


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_state_of_the_old_shape_is_refused(kind: str) -> None:
    net = nn.Linear(6, 4, bias=False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters())
    if kind == "momentum":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = cf.compile(net, loss_fn=lambda out, _: out.square().mean(), optimizer=optimizer)
    x = torch.randn(3, 6)
    step(x, x)
    net.weight.data = net.weight.data[:2].clone()
    with pytest.raises(
        cf.ConfigValueError,
        match=r"of weight has the shape \(4, 6\), and what is updated here of the parameter has \(2, 6\)",
    ):
        step(x, x)
    optimizer.state.clear()
    step(x, x)


def test_data_that_is_replaced_between_forward_and_backward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    call = cf.compile(model)
    x = torch.ones(2, 4, requires_grad=True)
    for number in (0, 1):
        loss = call(x).sum()
        old = model[2].weight.data
        model[2].weight.data = 2 * old
        with pytest.raises(RuntimeError, match=r"2\.weight got another \.data between the forward and the backward"):
            loss.backward()
        model[2].weight.data = old
        if number:
            loss.backward()  # it is the old one again
