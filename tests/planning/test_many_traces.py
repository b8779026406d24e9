"""A step that is traced again and again says so, why, and what to do."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import commfuse_fx as cf
from commfuse_fx.capture.guards.differences import cause as difference
from commfuse_fx.planning.plan_cache import MAX_GRAPHS
from commfuse_fx.planning.retrace_log import MANY


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: Any = None) -> torch.Tensor:
        x = self.drop(x) * scale * self.scale
        return self.head(x if mask is None else x * mask)


def step_of(net: nn.Module) -> cf.CompiledStep:
    return cf.compile(net, loss_fn=F.mse_loss)


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    records = [each for each in caplog.records if each.name == "commfuse_fx.retrace"]
    return [each.getMessage() for each in records if each.levelno == level]


def _shape(net: Net, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(number + 1, 4), torch.ones(number + 1, 2)), {}


def _number(net: Net, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(3, 4), float(number), torch.ones(3, 2)), {}


def _attribute(net: Net, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    net.drop.p = number / 100
    return (torch.ones(3, 4), torch.ones(3, 2)), {}


ENDLESS: dict[str, tuple[Callable[[Net, int], Any], str, str]] = {
    "shape": (_shape, "input.0 (x): f32[8,4] -> f32[9,4]", "drop_last=True"),
    "number": (_number, "input.1 (scale): 1.0 -> 2.0", "as tensors"),
    "attribute": (_attribute, "attribute drop.p: 0.01 -> 0.02", "register_buffer"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_the_trace_after_many_warns_once(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, cause, advice = ENDLESS[what]
    many = MANY if what == "shape" else 2
    monkeypatch.setattr("commfuse_fx.planning.retrace_log.MANY", many)
    net = Net()
    step = step_of(net)
    for number in range(many + 2):
        assert len(said(caplog, logging.WARNING)) == (number > many)
        args, kwargs = call(net, number)
        step(*args, **kwargs)
    (warning,) = said(caplog, logging.WARNING)
    assert f"a step of Net is being traced for the {many + 1}th time" in warning
    assert cause in warning and advice in warning and f"The last {MAX_GRAPHS} graphs are kept" in warning


def test_a_graph_that_had_to_go_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commfuse_fx.planning.plan_cache.MAX_GRAPHS", 2)
    net = Net()
    step = step_of(net)
    for number in (0, 1, 2, 1):
        step(*_shape(net, number)[0])
    assert len(step.planner.plans) == 2
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        step(*_shape(net, 0)[0])
    assert said(caplog, logging.INFO) == ["re-tracing: input.0 (x): f32[2,4] -> f32[1,4]"]


CAUSES: dict[str, tuple[Callable[[Net, torch.optim.Optimizer], Any], Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda net, o: None, lambda x: ((x > 0, x[:, :2]), {}), "input.0 (x): f32[3,4] -> b8[3,4]"),
    "strides": (
        lambda net, o: None, lambda x: ((x.t().contiguous().t(), x[:, :2]), {}),
        "input.0 (x): f32[3,4] with strides (4, 1) -> (1, 3)",
    ),
    "input that needs a gradient": (
        lambda net, o: None, lambda x: ((x.clone().requires_grad_(), x[:, :2]), {}), "with requires_grad False -> True"
    ),
    "target": (lambda net, o: None, lambda x: ((x, x[:, :2].double()), {}), "target: f32[3,2] -> f64[3,2]"),
    "keyword": (lambda net, o: None, lambda x: ((x, x[:, :2]), {"mask": x}), "input.mask: not given -> a tensor"),
    "positional": (lambda net, o: None, lambda x: ((x, 1.0, x[:, :2]), {}), "input.1 (scale): not given -> 1.0"),
    "mode": (lambda net, o: net.eval(), lambda x: ((x, x[:, :2]), {}), "mode of the model: train -> eval"),
    "mode of a part": (
        lambda net, o: net.drop.eval(), lambda x: ((x, x[:, :2]), {}), "mode of module drop: train -> eval"
    ),
    "frozen": (
        lambda net, o: net.head.bias.requires_grad_(False), lambda x: ((x, x[:, :2]), {}),
        "requires_grad of parameter head.bias: True -> False",
    ),
    "optimizer": (
        lambda net, o: o.param_groups[0].update(nesterov=True, momentum=0.9), lambda x: ((x, x[:, :2]), {}),
        "optimizer: momentum of param group 0: False -> True",
    ),
    "param group": (
        lambda net, o: o.add_param_group({"params": [o.param_groups[0]["params"].pop()]}),
        lambda x: ((x, x[:, :2]), {}),
        "optimizer: 1 -> 2 param groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_names_what_changed_and_both_values(name: str) -> None:
    change, call, cause = CAUSES[name]
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, device_num=2)
    planner = step.planner
    x = torch.ones(3, 4)
    before = planner.signature(planner.take_apart((x, x[:, :2]), {}))
    change(net, optimizer)
    args, kwargs = call(x)
    after = planner.signature(planner.take_apart(args, kwargs))
    assert difference(after, before, net).endswith(cause)


def test_the_default_dtype_is_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    step = cf.compile(model, loss_fn=lambda out, _: (out * torch.full((2,), 1 / 3)).sum())
    x = torch.ones(1, 2)
    step(x, None)
    try:
        torch.set_default_dtype(torch.float64)
        with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
            loss = step(x, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float64 and model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert said(caplog, logging.INFO) == ["re-tracing: default dtype: f32 -> f64"]


def test_what_chooses_kernels_is_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    """oneDNN lays the gradient of this weight out as the weight; without it, the gradient is contiguous."""
    torch.manual_seed(0)
    model = nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    step = cf.compile(model, loss_fn=lambda out, _: out.square().sum(), optimizer=optimizers[0])
    x = torch.randn(2, 2, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled), caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
            step(x, None)
            optimizers[1].zero_grad()
            twin(x).square().sum().backward()
            optimizers[1].step()
        torch.testing.assert_close(model.weight, twin.weight)
    assert said(caplog, logging.INFO) == ["re-tracing: torch.backends.mkldnn: True -> False"]


def test_which_kernels_attention_may_choose_is_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    class Attends(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            return F.scaled_dot_product_attention(x, x, x)

    step, x = step_of(Attends()), torch.randn(2, 3, 4)
    step(x, x[..., :2])
    with sdpa_kernel(SDPBackend.MATH), caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        step(x, x[..., :2])
        text = step.lower(x, x[..., :2]).text()
    assert "softmax" in text and "scaled_dot_product" not in text
    assert said(caplog, logging.INFO) == [
        "re-tracing: flash attention: True -> False; memory-efficient attention: True -> False; "
        "attention by cuDNN: True -> False"
    ]


def test_gradients_and_autocast_are_causes(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    step = step_of(net)
    x = torch.ones(3, 4)
    step(x, x[:, :2])
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        with torch.no_grad():
            step(x, x[:, :2])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(x, x[:, :2])
    assert said(caplog, logging.INFO) == [
        "re-tracing: gradients: enabled -> disabled",
        "re-tracing: autocast on cpu: off -> bf16; gradients: disabled -> enabled",
    ]  # fmt: skip
