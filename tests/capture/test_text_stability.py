"""Canonical text: the same in every run, and a change of the model changes only the lines it touches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.lowered import Lowered
from tests.distributed.harness import Ranks


class Model(nn.Module):
    def __init__(self, relu: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.attend = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.last = nn.Linear(8, 4)
        self.relu = relu
        if relu == "module":
            self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(F.gelu(self.first(x))))
        if self.relu == "module":
            x = self.act(x)
        if self.relu == "function":
            x = F.relu(x)
        x = self.attend(x[:, None]).squeeze(1)
        return F.gelu(self.last(F.gelu(x)))


def lower(model: nn.Module) -> Lowered:
    fusion = {"allreduce": {"mode": "size", "config": 1}}
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(model, fusion, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, device_num=2, global_rank=0)
    return step.lower(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))


def all_text() -> str:
    lowered = lower(Model("module"))
    return lowered.text() + lowered.stages["capture"].text() + lowered.to_json()


@pytest.mark.dist
def test_text_is_the_same_in_every_process(ranks: Ranks) -> None:
    """This one and two others, of other hash seeds."""
    assert ranks.values_of_other_seeds(all_text) == [all_text()] * 2


def test_text_is_the_same_in_one_process() -> None:
    first, second = lower(Model()), lower(Model())
    assert first.text() == second.text()
    assert first.fingerprint == second.fingerprint


def _lines(model: nn.Module) -> tuple[list[str], list[str]]:
    lowered = lower(model)
    return lowered.text().splitlines(), lowered.stages["capture"].text().splitlines()


@pytest.mark.parametrize("form", ["module", "function"])
def test_inserting_a_relu_changes_only_the_lines_it_touches(form: str) -> None:
    for old, new in zip(_lines(Model()), _lines(Model(form)), strict=True):
        kept = dict.fromkeys(old)
        added = [line for line in new if line not in kept]
        removed = [line for line in old if line not in dict.fromkeys(new)]
        names = [line.split(":")[0].split(" ")[-1] for line in added]
        relu = [name for name in names if "relu" in name or "threshold" in name]
        # Besides the new ops, the lines of those that read the new values; none of them gets another name.
        assert relu
        others = [name for name in names if name not in relu]
        assert sorted(others) == sorted(line.split(":")[0].split(" ")[-1] for line in removed)
        assert len(others) <= 4, others
        # What both have stands in the same order.
        common = dict.fromkeys(new)
        assert [line for line in old if line in common] == [line for line in new if line in kept]


def test_nodes_that_only_stand_for_another_one_are_left_out() -> None:
    """Where a trace has them depends on the version of torch. The first one's gradient is that of the second."""

    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x.detach()) + torch.ops.aten.alias(self.bias)).sum()

    step = cf.compile(Sum(4, 4), device_num=2, global_rank=0)
    for text in (step.lower(torch.ones(2, 4)).stages["capture"].text(), lower(Model()).stages["capture"].text()):
        assert "addmm" in text and "detach" not in text and "alias" not in text


def test_every_op_has_phase_module_and_source() -> None:
    for node in lower(Model("function")).graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        details = node.meta["commfuse"]
        assert details.phase in ("forward", "backward", "update")
        if details.phase == "forward":
            assert details.source, details.name
        if details.phase == "backward" and "/grad." in details.name:
            assert details.source, details.name
