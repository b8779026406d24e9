"""Marks that are made, changed or removed after the first compile count from the next call on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.text.write_text import canonical_text
from tests.logs import logged

BATCH = torch.ones(2, 4), torch.ones(2, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def compiled(net: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return cf.compile(net, loss_fn=nn.MSELoss(), optimizer=optimizer, device_num=2, **options)


def buckets(step: Any) -> list[list[str]]:
    return [collective.members for collective in step.lower(*BATCH).collectives]


def test_fusion_ids() -> None:
    net = model()
    step = compiled(net)
    assert buckets(step) == [["1.weight", "1.bias", "0.weight", "0.bias"]]
    net[0].weight.comm_fusion = 0
    assert buckets(step) == [["0.weight"], ["1.weight", "1.bias", "0.bias"]]
    cf.set_comm_fusion(net[1], 2)
    assert buckets(step) == [["1.weight", "1.bias"], ["0.weight"], ["0.bias"]]
    del net[0].weight.comm_fusion
    cf.set_comm_fusion(net, 2)
    assert buckets(step) == [["1.weight", "1.bias", "0.weight", "0.bias"]]


def test_parameters_that_are_left_out() -> None:
    net = model()
    step = compiled(net, parallel_mode="hybrid_parallel")
    assert len(buckets(step)[0]) == 4
    net[0].weight.layerwise_parallel = True
    assert buckets(step) == [["1.weight", "1.bias", "0.bias"]]


def test_buffers_that_are_left_out() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step = compiled(net, parallel_mode="hybrid_parallel", broadcast_buffers=True)
    batch = torch.randn(3, 4), torch.randn(3, 4)

    def sent() -> list[str]:
        return [name for each in step.lower(*batch).collectives if each.kind == "broadcast" for name in each.members]

    assert sorted(sent()) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    net[1].running_mean.layerwise_parallel = True
    assert sorted(sent()) == ["1.num_batches_tracked", "1.running_var"]
    lowered = step.lower(*batch)
    assert "# of_each_rank: 1.running_mean (layerwise_parallel" in lowered.text()
    assert "1.running_mean: it is marked layerwise_parallel" in lowered.explain().text()
    again = from_json(lowered.to_json())
    assert again.own_buffers == ("1.running_mean",) and canonical_text(again) == lowered.text()
    net[1].running_mean.layerwise_parallel = False
    assert "1.running_mean" in sent() and "of_each_rank" not in step.lower(*batch).text()


@pytest.mark.parametrize(
    ("form", "mode", "is_told"),
    [
        ("step", "data_parallel", True),
        ("step", "semi_auto", True),
        ("step", "stand_alone", False),
        ("step", "hybrid_parallel", False),
        ("module", "data_parallel", True),
        ("dynamo", "data_parallel", True),
    ],
)
def test_marks_of_each_rank_where_ranks_share_all(
    form: str, mode: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].weight.layerwise_parallel = net[1].running_mean.layerwise_parallel = True
    capture: dict[str, Any] = {"capture": "dynamo"} if form == "dynamo" else {}
    made = compiled(net, parallel_mode=mode) if form == "step" else cf.compile(net, device_num=2, **capture)
    for rows in (3, 5):
        batch = (torch.randn(rows, 4),) * (2 if form == "step" else 1)
        notes = [(each.subject, each.reason) for each in made.lower(*batch).explain().notes]
        why = f'it has no effect with parallel_mode="{mode}", where ranks share all parameters and buffers'
        assert ((("0.weight", why) in notes) and (("1.running_mean", why) in notes)) == is_told
    said = [each.getMessage() for each in caplog.records if "layerwise_parallel of" in each.getMessage()]
    fix = 'pass parallel_mode="hybrid_parallel", or remove the mark'
    assert said == [f"layerwise_parallel of 0.weight, 1.running_mean: {why}; {fix}"] * is_told


def test_a_mark_without_effect_hides_no_other_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Written(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.bias.copy_(x.mean(0))
            return super().forward(x)

    for mode, is_told in (("data_parallel", True), ("hybrid_parallel", False)):
        caplog.clear()
        net = Written(4, 4)
        net.bias.layerwise_parallel = True
        compiled(net, parallel_mode=mode).lower(*BATCH)
        assert any("parameter bias: the forward writes" in each.getMessage() for each in caplog.records) == is_told


@pytest.mark.parametrize(
    "mark",
    [
        lambda net: cf.shard(net[0].weight, (2, 1)),
        lambda net: cf.shard(net[0], weight=(2, 1)),
        lambda net: cf.shard(net, {"0.weight": (2, 1)}),
    ],
)
def test_layouts(mark: Callable[[nn.Module], Any]) -> None:
    net = model()
    step = compiled(net, parallel_mode="semi_auto", mesh=(2,))
    assert not step.lower(*BATCH).program.params["0.weight"].layout
    mark(net)
    assert step.lower(*BATCH).program.params["0.weight"].layout


def test_other_attributes_and_other_models_change_nothing() -> None:
    net = model()
    step = cf.compile(net, loss_fn=nn.MSELoss())
    step(*BATCH)
    executor = step.session.running
    net[0].weight.note = torch.ones(3)
    step(*BATCH)
    cf.shard(model()[0].weight, (2, 1))
    cf.set_comm_fusion(model(), 1)
    step(*BATCH)
    assert step.session.running is executor
    net[0].weight.note = torch.ones(3)
    step(*BATCH)
    assert step.session.running is executor
    net[0].weight.comm_fusion = 0
    with logged() as messages:
        step(*BATCH)
    assert [text for text in messages if "mark of parameter 0.weight was added" in text]
