"""What an error that leaves a public function shows: the user's frames and the message, not how it got there."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.planning import planner
from tests.distributed.harness import Ranks
from tests.logs import logged


class Block(nn.Module):
    """One layer, and what `act` does to its output."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


def branch(y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:  # the line to show
        return y * 2
    return y


def own_error(y: torch.Tensor) -> torch.Tensor:
    try:
        raise KeyError("inner")  # the cause
    except KeyError as error:
        raise ValueError("my own error") from error  # the line to show


def wrong_shape(y: torch.Tensor) -> torch.Tensor:
    return F.linear(y, torch.ones(3, 7))  # the line to show


def wrong_dtype(y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, y.argmax(1).float())  # the line to show


def seeds(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)  # the line to show
    return y


def call(act: Callable[[torch.Tensor], torch.Tensor], method: str = "__call__") -> None:
    model = nn.Sequential(Block(act), nn.ReLU())
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    getattr(step, method)(torch.randn(4, 8), torch.randn(4, 4))


def printed(function: Callable[..., Any], *args: Any) -> str:
    """What Python prints if nobody catches the error."""
    with pytest.raises(Exception) as caught:
        function(*args)
    return "".join(traceback.format_exception(caught.value))


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMFUSE_TRACEBACK", raising=False)


def assert_short(text: str) -> None:
    assert len(text.splitlines()) < 25, text
    for hidden in ("commfuse_fx/", "torch/fx", "_subclasses", "torch/_ops", "nn/modules/module.py", "autograd/"):
        assert f"{hidden}" not in "".join(line for line in text.splitlines() if line.startswith("  File")), text


@pytest.mark.parametrize("act", [branch, own_error, wrong_shape, wrong_dtype, seeds])
@pytest.mark.parametrize("method", ["__call__", "lower", "profile"])
def test_an_error_shows_the_users_line_and_ends_with_its_message(act: Any, method: str):
    text = printed(call, act, method)
    assert_short(text)
    assert "# the line to show" in text
    assert "getattr(step, method)" in text
    *_, last = text.splitlines()
    assert last.startswith(("commfuse_fx.errors.CaptureError: cannot trace 0 at ", "ValueError: my", "RuntimeError: "))


def test_causes_stay():
    text = printed(call, own_error)
    assert "# the cause" in text and "KeyError: 'inner'" in text and "direct cause" in text
    with pytest.raises(cf.CaptureError) as caught:
        call(branch)
    assert caught.value.__cause__ is not None


def test_full_shows_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMMFUSE_TRACEBACK", "full")
    text = printed(call, branch)
    assert "commfuse_fx/frontends/step.py" in text and "torch/fx/" in text and "# the line to show" in text
    assert len(text.splitlines()) > 60


def test_options_that_are_wrong():
    for function in (
        lambda: cf.compile(nn.Linear(2, 2), comm_fusion=3, form="step"),
        lambda: cf.set_auto_parallel_context(nothing=1),
        lambda: cf.set_comm_fusion(nn.Linear(2, 2), -1),
        lambda: cf.load("/nowhere"),
        lambda: cf.shard(nn.Linear(2, 2), weight=3),
        lambda: cf.register_rule(3),
    ):
        text = printed(function)
        assert_short(text)
        assert len(text.splitlines()) < 15, text


def test_a_bad_batch_in_a_running_step():
    model = nn.Linear(8, 4)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    text = printed(step, torch.randn(4, 8), torch.full((4,), 9))
    assert_short(text)
    assert "Target 9 is out of bounds" in text


def test_a_fault_of_this_project_keeps_its_frames(monkeypatch: pytest.MonkeyPatch):
    def broken(self: Any, *args: Any) -> None:
        raise AssertionError

    broken.__code__ = broken.__code__.replace(co_filename=planner.__file__)
    monkeypatch.setattr(planner.Planner, "_describe_optimizer", broken)
    assert "commfuse_fx/planning/planner.py" in printed(call, torch.relu)


def test_torch_logs_nothing_about_a_trace_that_failed(monkeypatch: pytest.MonkeyPatch):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError):
            call(wrong_dtype)
        assert records == []
        monkeypatch.setenv("COMMFUSE_TRACEBACK", "full")
        with pytest.raises(RuntimeError):
            call(wrong_dtype)
        assert records != []
    finally:
        logger.removeHandler(handler)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(self.layer(x))
        return self.kept[-1]


def warned_while_shapes_change() -> list[str]:
    model = Keeps()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with logged(logging.WARNING) as found:
        for rows in (2, 3, 4):
            step(torch.randn(rows, 8), torch.randn(rows, 4))
    return found


def test_a_warning_is_given_once():
    (text,) = warned_while_shapes_change()
    assert text.startswith("the model stores a tensor in its attribute kept")


@pytest.mark.dist
@pytest.mark.xdist_group("dist")
def test_on_two_ranks(ranks: Ranks):
    for outcome in ranks.run(call, branch):
        assert_short(outcome.details)
        assert "# the line to show" in outcome.details
        assert outcome.error.startswith("CaptureError: cannot trace 0 at ")
    for rank, found in enumerate(ranks.values(warned_while_shapes_change)):
        (text,) = [each for each in found if "attribute kept" in each]
        assert text.startswith(f"[rank {rank}] the model stores")
