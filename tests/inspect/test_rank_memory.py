"""What each rank holds, beside figures computed by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf

WHOLE = {"parameters": 420, "gradients": 408, "optimizer state": 2 * 408 + 5 * 4}
"""In bytes: 48 + 8 + 40 + 5 + 1 elements that are trained, 3 that are not, and five step counts."""


class Net(nn.Module):
    """Rows that divide by 4 ranks and others, a scalar, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.into(x))) * self.scale + self.shift.sum()


def memory(optimizer: Any = torch.optim.AdamW, options: Any = None, net: Any = None, **others: Any) -> cf.RankMemory:
    net = net or Net()
    divided = {} if options is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": options}
    updates = optimizer(net.parameters(), lr=0.1)
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=updates, **{"device_num": 4, **divided, **others})
    x = next(net.parameters()).new_zeros(4, 6)
    explanation = step.lower(x, net(x).detach()).explain()
    found = explanation.memory
    assert (found.text() in explanation.text()) == found.is_divided
    assert found.peak == explanation.simulation.peak_memory > sum(each.per_rank for each in found.held)
    return found


def whole(found: cf.RankMemory) -> dict[str, int]:
    return {each.kind: each.whole for each in found.held}


def per_rank(found: cf.RankMemory) -> dict[str, int]:
    return {each.kind: each.per_rank for each in found.held}


@pytest.mark.parametrize("fusion", [None, {"openstate": False}], ids=["flat", "apart"])
def test_nothing_is_divided_in_plain_data_parallel(fusion: Any) -> None:
    found = memory(comm_fusion=fusion)
    assert whole(found) == per_rank(found) == WHOLE


@pytest.mark.parametrize("fusion", [None, {"openstate": False}], ids=["fused", "apart"])
def test_rows_of_each_parameter_and_its_state(fusion: Any) -> None:
    """2 of 8 rows of `into`, 2 of 5 of `head` (padded), and all of the scalar."""
    found = memory(options={"parallel_optimizer_threshold": 0, "pad": True}, comm_fusion=fusion)
    rows = 4 * (2 * 6 + 2 + 2 * 8 + 2 + 1)
    assert whole(found) == WHOLE
    assert per_rank(found) == {"parameters": 420, "gradients": rows, "optimizer state": 2 * rows + 5 * 4}


def test_what_is_kept_whole_counts_as_whole() -> None:
    found = memory(options={"parallel_optimizer_threshold": 0})
    rows = 4 * (2 * 6 + 2 + 5 * 8 + 5 + 1)
    assert per_rank(found) == {"parameters": 420, "gradients": rows, "optimizer state": 2 * rows + 5 * 4}
    assert per_rank(memory(options={})) == WHOLE  # all are below the threshold


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_state_is_one_nth(ranks: int) -> None:
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).bfloat16()
    sgd = lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)  # noqa: E731
    (_, _, state) = memory(sgd, {"parallel_optimizer_threshold": 0}, net, device_num=ranks).held
    assert state == cf.HeldBytes("optimizer state", 2 * 80, 2 * 80 // ranks)


def test_parts_of_a_strategy_are_divided_further() -> None:
    net = Net()
    cf.shard(net, "into", weight=("tp", None))
    cf.shard(net, "head", weight=(None, "tp"))
    semi_auto: dict[str, Any] = {"parallel_mode": "semi_auto", "mesh": (2, 2), "net": net}
    kept = 20 + 5 + 1
    parts = {"parameters": 4 * (24 + 4 + kept + 3), "gradients": 4 * (24 + 4 + kept)}
    found = memory(**semi_auto)
    assert whole(found) == WHOLE
    assert per_rank(found) == {**parts, "optimizer state": 8 * (24 + 4 + kept) + 5 * 4}
    divided = memory(options={"parallel_optimizer_threshold": 0}, **semi_auto)
    assert whole(divided) == WHOLE and per_rank(divided)["parameters"] == parts["parameters"]
    assert per_rank(divided)["optimizer state"] == 8 * (12 + 2 + kept) + 5 * 4


def test_rows_of_parameters_are_held_at_level_3() -> None:
    """2 of 8 rows of `into`; `head` has 5 rows, which do not divide."""
    found = memory(options={"parallel_optimizer_threshold": 0, "level": 3})
    kept = 40 + 5 + 1
    assert whole(found) == WHOLE
    assert per_rank(found) == {
        "parameters": 4 * (12 + 2 + kept + 3),
        "gradients": 4 * (12 + 2 + kept),
        "optimizer state": 8 * (12 + 2 + kept) + 5 * 4,
    }


def test_an_optimizer_without_a_rule_holds_what_the_graph_does_not_show() -> None:
    class Own(torch.optim.SGD):
        """A class without a rule."""

    found = memory(Own)
    assert whole(found) == per_rank(found) == {"parameters": 420, "gradients": 408}
    assert "  Own holds its state itself, so the graph does not show how much that is\n" in found.text()


def test_memory_that_parameters_share_counts_once() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.view = nn.Parameter(self.into.weight.detach()[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.view.sum()

    found = memory(net=Tied())
    assert whole(found)["parameters"] == 420 and whole(found)["gradients"] == 408 + 48


@pytest.mark.parametrize("options", [{}, {"optimizer_weight_shard_size": 2}, {"level": 3}], ids=str)
def test_it_is_the_same_of_a_graph_that_was_saved(tmp_path: Path, options: dict[str, int]) -> None:
    net = Net()
    step = cf.compile(
        net, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW(net.parameters()), device_num=4,
        enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0, **options},
    )  # fmt: skip
    lowered = step.lower(torch.zeros(4, 6), torch.zeros(4, 5))
    lowered.dump(tmp_path)
    loaded = cf.load(tmp_path)
    assert asdict(loaded.explain().memory) == asdict(lowered.explain().memory) and loaded.text() == lowered.text()


def test_the_table() -> None:
    net = nn.Linear(6, 8, bias=False)
    text = memory(torch.optim.SGD, {"parallel_optimizer_threshold": 0}, net).text()
    head, *rows, peak = text.splitlines()
    assert head == "memory per rank on dp=4, in bytes (whole: where nothing is divided, as on one device)"
    assert rows == [
        "                   whole  per rank",
        "  parameters         192       192",
        "  gradients          192        48",
        "  optimizer state      0         0",
        "  together           384       240",
    ]
    assert peak.startswith("  predicted peak of the step, with activations: ")
