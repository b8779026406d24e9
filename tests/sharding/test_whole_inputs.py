"""full_batch=True: ranks are handed the whole batch, so no part of it is ever sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.machine.presets import resolve_cluster
from tests.models import Case
from tests.sharding.divided_oracle import Mark, compare, no_marks
from tests.sharding.test_search import slow_device

WIDE = 64


class Wide(nn.Module):
    """Layers that are divided by columns and rows need all rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE), nn.Linear(WIDE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.relu(self.up(x))))


CASE = Case("wide", Wide, lambda rows: (torch.randn(rows, WIDE), torch.randint(0, 4, (rows,))))


def megatron(model: nn.Module) -> None:
    cf.shard(model, "up", weight=("tp", None), bias=("tp",))
    cf.shard(model, "down", weight=(None, "tp"))


def whole_at_both_ends(model: nn.Module) -> None:
    """Every rank computes all rows, of which the mesh divides none."""
    cf.shard(model, in_strategy=((None, None),), out_strategy=((None, None),))


def divided_features(model: nn.Module) -> None:
    """Columns of the input over the axis that the batch is divided over."""
    cf.shard(model, "up", in_strategy=((None, "dp"),), weight=(None, "dp"))


def sent(program: Any) -> list[str]:
    """What collectives send."""
    return [member for node in program.collectives() for member in info(node).collective.members]


def of_inputs(program: Any) -> list[str]:
    return [each for each in sent(program) if each.startswith(("input", "target", "slice"))]


SEARCHED = {"parallel_mode": "auto", "cluster": slow_device("gloo-1gbit", 1e-3, 1.0)}


@pytest.mark.parametrize(
    ("mesh", "mark", "options"),
    [
        ((4,), no_marks, SEARCHED),
        ((2, 2), no_marks, SEARCHED),
        ((4,), whole_at_both_ends, {}),
        ((2, 2), whole_at_both_ends, {}),
        ((2, 2), divided_features, {}),
        ((2, 2), megatron, {}),
    ],
)
def test_nothing_of_the_batch_is_sent(mesh: tuple[int, ...], mark: Mark, options: Mapping[str, Any]) -> None:
    found = compare(CASE, mesh, mark, gradients=False, **options)
    assert sent(found.program) and not of_inputs(found.program)
    if "cluster" in options:
        assert "S(0)" in found.layouts()["up.weight"], "layers that need all rows"


def test_what_ranks_are_not_handed_is_gathered() -> None:
    found = compare(CASE, (4,), whole_at_both_ends, gradients=False, ways=4)
    assert of_inputs(found.program)


def test_a_search_pays_nothing_for_the_whole_batch() -> None:
    """The same strategies cost less by what gathers of the batch take."""
    seconds = {}
    for is_whole in (True, False):
        model, rows = Wide(), 32 if is_whole else 8
        x, y = torch.randn(rows, WIDE), torch.zeros(rows, dtype=torch.int64)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile(
            model, loss_fn=F.cross_entropy, optimizer=sgd, device_num=4, mesh=(4,), full_batch=is_whole, **SEARCHED
        )
        seconds[is_whole] = step.lower(x, y).program.search_seconds
    latency = resolve_cluster("gloo-1gbit").levels[0].alpha
    assert seconds[True] < seconds[False] - latency
