"""A forward may change its own model: that traces nothing again."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.frontends.changing_models import Settings, retraced, values


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


class Counting(nn.Module):
    """Changes its own attributes in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.way, self.calls, self.counts, self.settings, self.seen = way, 0, {"calls": 0}, Settings(), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "number":
            self.calls += 1
        elif self.way == "dict":
            self.counts["calls"] += 1
        elif self.way == "object":
            self.settings.scale += 1
        elif self.way == "list":
            self.seen.append(len(self.seen))
        elif self.way == "written first":
            self.rows = x.shape[0]
            return self.lin(x) * self.rows
        elif self.way == "cached":
            if not hasattr(self, "kept"):
                self.kept = 3.0
            return self.lin(x) * self.kept
        return self.lin(x)


OWN = {
    "number": "Counting.calls in forward (0 -> 1)",
    "dict": "Counting.counts['calls'] in forward (0 -> 1)",
    "object": "Counting.settings.scale in forward (1.0 -> 2.0)",
    "list": "Counting.seen in forward (list(0) -> list(0, 1))",
    "written first": "",
    "cached": "",
}


@pytest.mark.parametrize("way", OWN)
def test_what_a_forward_changes_itself_traces_nothing_again(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where two shapes take turns, of which each leaves another value; a warning tells of it once.

    A result that is kept where there was none is traced once more, as the forward may go another way then.
    """
    net = Counting(way)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for rows in (6, 3, 6, 3, 6):
            torch.testing.assert_close(step(x[:rows], y[:rows]), F.mse_loss(net(x[:rows]), y[:rows]).detach())
            if way == "number":
                net.calls = 0
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == (OWN[way] != "") and all(OWN[way] in each for each in warned), warned
    if way in ("number", "written first", "cached"):
        assert len(retraced(caplog)) == (2 if way == "cached" else 1)
