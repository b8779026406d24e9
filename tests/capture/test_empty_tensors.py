"""A batch without rows gives the values and the errors of eager execution; anomaly detection does not disturb."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _classes(output: torch.Tensor) -> torch.Tensor:
    return torch.zeros(output.shape[0], dtype=torch.long)


LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "mse sum": lambda o, t: F.mse_loss(o, t, reduction="sum"),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "cross entropy": lambda o, t: F.cross_entropy(o, _classes(o)),
    "smoothed": lambda o, t: F.cross_entropy(o, _classes(o), label_smoothing=0.1),
    "nearest": lambda o, t: F.interpolate(o[:, None], scale_factor=2).mean(),
    "layer norm": lambda o, t: F.layer_norm(o, (4,)).mean(),
    "sum": lambda o, t: o.sum(),
    "amax": lambda o, t: o.amax(0).sum(),
    "batch norm": lambda o, t: F.batch_norm(o, None, None, training=True).sum(),
    "max": lambda o, t: o.max(),
}


def _outcome(run: Callable[[], torch.Tensor], model: nn.Module) -> tuple[str, ...]:
    try:
        loss = run()
    except Exception as error:
        return type(error).__name__, str(error)[:60]
    return str(loss.item()), *(str(param.grad.tolist()) for param in model.parameters() if param.grad is not None)


@pytest.mark.parametrize("parallel_mode", ["data_parallel", "semi_auto"])
def test_losses_of_no_rows(parallel_mode: str) -> None:
    x, y = torch.randn(0, 8), torch.rand(0, 4)
    for name, loss_fn in LOSSES.items():
        eager = nn.Linear(8, 4)
        model = copy.deepcopy(eager)

        def run(model: nn.Module = eager, loss_fn: Loss = loss_fn) -> torch.Tensor:
            loss = loss_fn(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        step = cf.compile(model, loss_fn=loss_fn, parallel_mode=parallel_mode, form="step")
        assert _outcome(lambda: step(x, y), model) == _outcome(run, eager), name  # noqa: B023


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(3, 8), torch.randn(3, 4)
    model = nn.Linear(8, 4)
    with caplog.at_level(logging.WARNING, "commfuse_fx"), torch.autograd.detect_anomaly():
        loss = cf.compile(model, loss_fn=F.mse_loss)(x, y)
        assert torch.is_anomaly_enabled()
    assert loss == F.mse_loss(model(x), y) and model.weight.grad is not None
    assert "anomaly detection is switched off while the model is traced" in caplog.text
    torch.autograd.set_detect_anomaly(True)
    try:
        cf.compile(nn.Linear(8, 4), loss_fn=F.mse_loss)(x, y)
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
