"""What cannot be divided is refused when the step is compiled, with a way out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf


def lower(model: nn.Module, *args: torch.Tensor, mesh: tuple[int, ...] = (8,), **options: Any) -> cf.Lowered:
    settings = {"parallel_mode": "semi_auto", "full_batch": True, "device_num": 8, "mesh": mesh, **options}
    return cf.compile(model, **settings, form="step").lower(*args)


class TwoLayouts(nn.Module):
    """The example of the documents that this interface comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.mul1 = cf.shard(torch.mul, ((8, 1), (8, 1)))
        self.mul2 = cf.shard(torch.mul, ((1, 8), (1, 8)))
        self.weight = nn.Parameter(torch.ones(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mul2(self.mul1(x, self.weight), self.weight).sum()


def test_one_weight_with_two_layouts_names_both_ops() -> None:
    with pytest.raises(cf.ConfigValueError) as error:
        lower(TwoLayouts(), torch.randn(16, 32))
    message = str(error.value)
    assert "parameter weight" in message and "torch.mul" in message
    assert "(8, 1)" in message and "S(0)" in message and "(1, 8)" in message and "S(1)" in message
    assert message.count(Path(__file__).name) == 2


class Communicates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cf.ops.all_reduce(self.linear(x)).sum()


def test_collectives_in_the_model_are_refused() -> None:
    with pytest.raises(cf.ConfigValueError, match=r"cf\.ops\.all_reduce.*remove the call, or use parallel_mode"):
        lower(Communicates(), torch.randn(8, 4))


def mark_and_lower(strategy: Any, mesh: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))
    cf.shard(model[0].weight, strategy)
    lower(model, torch.randn(8, 12), torch.randn(8, 4), mesh=mesh, loss_fn=nn.MSELoss())


@pytest.mark.parametrize(
    ("strategy", "mesh", "parts"),
    [
        ((8, 1), (8,), ("(8, 1)", "size 10", "8 slices", "divides 10")),
        ((5, 1), (8,), ("(5, 1)", "does not divide the world of 8")),
        (("tp", "tp"), (2, 4), ("axis 'tp' twice",)),
        (("model", None), (2, 4), ("'model'", "axes are dp, tp")),
        ((2, 1, 1), (8,), ("3 entries", "2 dimensions")),
    ],
    ids=["size", "world", "twice", "unknown", "rank"],
)
def test_a_strategy_that_does_not_fit(strategy: Any, mesh: tuple[int, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(cf.ConfigValueError) as error:
        mark_and_lower(strategy, mesh)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(cf.ConfigValueError, match=r"'blocks\.\*\.fc' matches no module"):
        cf.shard(nn.Sequential(nn.Linear(2, 2)), "blocks.*.fc", weight=(2, 1))


def test_a_batch_that_does_not_divide() -> None:
    said = r"global batch of 6 \(input\.0\) does not divide by the 8 ranks of .*; pad it to 8 rows$"
    with pytest.raises(cf.ConfigValueError, match=said):
        lower(nn.Linear(4, 4), torch.randn(6, 4), torch.randn(6, 4), loss_fn=nn.MSELoss())


def test_other_modes_ignore_marks(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoLayouts()
    with caplog.at_level(logging.WARNING):
        lowered = lower(model, torch.randn(16, 32), parallel_mode="data_parallel", full_batch=False)
    assert [each.kind for each in lowered.collectives] == ["all_reduce"]
    assert "layout" not in lowered.text()
