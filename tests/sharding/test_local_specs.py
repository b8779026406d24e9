"""Specs of local results are found once in a process, as long as they follow from the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, set_info
from commfuse_fx.sharding.dividing import localize
from commfuse_fx.sharding.dividing.localize import LocalSpecs

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The targets of calls that have run since the test began."""
    run, targets = LocalSpecs._run, list[Any]()

    def noted(self: LocalSpecs, target: Any, *given: Any) -> Any:
        targets.append(target)
        return run(self, target, *given)

    monkeypatch.setattr(LocalSpecs, "_run", noted)
    monkeypatch.setattr(localize, "_remembered", {})
    return targets


def node(*shape: int) -> fx.Node:
    spec = TensorSpec(shape, torch.float32, torch.empty(shape).stride(), "cpu")
    return set_info(fx.Graph().placeholder("x"), NodeInfo("input", spec=spec))


@torch.library.custom_op("tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


@tripled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_compiles_share_the_specs_of_torchs_ops(ran: list[Any]) -> None:
    first, second = LocalSpecs(), LocalSpecs()
    for specs in (first, second):
        for rows in (2, 2, 4):
            target, spec = specs.of(aten.sum.dim_IntList, (node(rows, 3), [1]), {})
            assert target is aten.sum.dim_IntList and spec.shape == (rows,)
            specs.of(torch.ops.tests.tripled.default, (node(rows, 3),), {})
    assert ran.count(aten.sum.dim_IntList) == 2, "once for each shape"
    assert ran.count(torch.ops.tests.tripled.default) == 4, "once for each shape and compile"


def test_another_default_dtype_makes_another_result() -> None:
    before = torch.get_default_dtype()
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            _, spec = LocalSpecs().of(aten.ones.default, ([2],), {})
        finally:
            torch.set_default_dtype(before)
        found.append(spec.dtype)
    assert found == [torch.float32, torch.float64]


def test_not_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localize, "_MOST", 3)
    for size in range(1, 9):
        LocalSpecs().of(aten.neg.default, (node(size),), {})
        assert 1 <= len(localize._remembered) <= 3


def test_a_step_that_is_compiled_again_runs_no_op(ran: list[Any]) -> None:
    texts, counts = [], []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        cf.shard(model, "0", weight=("tp", None))
        step = cf.compile(model, loss_fn=F.mse_loss, parallel_mode="semi_auto", mesh=(2, 2), device_num=4)
        ran.clear()
        texts.append(step.lower(torch.empty(8, 8), torch.empty(8, 8)).text())
        counts.append(sum(getattr(target, "namespace", "") == "aten" for target in ran))
    assert counts[0] > 3 and counts[1] == 0 and texts[0] == texts[1]
