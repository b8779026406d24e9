"""Parts of sums over ranks: a rank that keeps a part adds up that part alone, unless other ranks need its summands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from commfuse_fx.ir.placement import P, R, S
from commfuse_fx.sharding.dividing.decisions import Decisions, State
from commfuse_fx.sharding.dividing.strategies import Strategies
from tests.models import Case
from tests.sharding.divided_oracle import compare


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum()


LAYER = Case(
    "layer", lambda: nn.Linear(4, 4, bias=False), lambda rows: (torch.randn(rows, 4), torch.randn(rows, 4)), product
)

OF_ROWS = {"/grad.t.0": State((S(1),), (S(0),)), "/grad.mm.0": State((P,), (S(1), S(0)))}
"""The gradient of the weight, where each rank has rows of the batch."""

STANDS = {"first": {"/grad.mm.0/sum": State((R,), (R,))}, "last": {"/grad.mm.0/sum": State((P,), (P,))}}
"""Where the sum over tp stands beside that over dp."""


@pytest.mark.parametrize("where", STANDS)
def test_a_part_of_a_sum_over_the_ranks_that_keep_parts(where: str, tmp_path: Path) -> None:
    """The gradient is a partial sum on both axes, and tp divides the weight. A rank's own part of its summand would be
    too little to add up over tp: the other ranks need the rest of it."""
    axes = {
        "dp": Decisions({"weight": R}, OF_ROWS, (1,)),
        "tp": Decisions({"weight": S(1)}, {**OF_ROWS, **STANDS[where]}, (1,)),
    }
    file = tmp_path / "strategies.json"
    file.write_text(Strategies(mesh={"dp": 2, "tp": 2}, axes=axes).to_json())
    found = compare(LAYER, (2, 2), parallel_mode="auto", strategy_ckpt_load_file=file, gradients=False)
    assert found.layouts() == {"weight": "S(1) on tp"}
    assert [note.subject for note in found.program.notes if "not applied" in note.topic] == []
