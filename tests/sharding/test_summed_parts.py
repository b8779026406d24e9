"""Parts of sums over ranks: a rank that keeps a part adds up that part alone, unless other ranks need its summands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.placement import P, R, S
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


def rows_in_parts(file: Path) -> Path:
    """Strategies: all ranks have rows of the batch, and tp divides the weight."""
    axes = {"dp": Decisions({"weight": R}, OF_ROWS, (1,)), "tp": Decisions({"weight": S(1)}, OF_ROWS, (1,))}
    file.write_text(Strategies(mesh={"dp": 2, "tp": 2}, axes=axes).to_json())
    return file


def test_a_gradient_is_summed_over_dp_in_the_parts_that_tp_keeps(tmp_path: Path) -> None:
    """Neighbours get their parts of the gradient first, so that a part alone is sent over dp."""
    file = rows_in_parts(tmp_path / "strategies.json")
    found = compare(LAYER, (2, 2), parallel_mode="auto", strategy_ckpt_load_file=file, gradients=False)
    details = [info(node).collective for node in found.program.collectives()]
    sums = [(each.kind, each.group, each.nbytes) for each in details if each.role == "gradient"]
    assert sums == [("reduce_scatter", "tp", 128), ("all_reduce", "dp", 64)]


def test_a_gradient_in_bf16_is_summed_in_float32_over_all_axes(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4, bias=False).bfloat16(), torch.randn(4, 4, dtype=torch.bfloat16)
    file = rows_in_parts(tmp_path / "strategies.json")
    options = {"parallel_mode": "auto", "mesh": (2, 2), "device_num": 4, "strategy_ckpt_load_file": file}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lowered = cf.compile(model, loss_fn=product, optimizer=sgd, **options).lower(x, x)
    sums = [(each.kind, each.dtype, each.bytes) for each in lowered.collectives if "weight" in each.members]
    assert sums == [("reduce_scatter", torch.float32, 64), ("all_reduce", torch.float32, 32)]
    names = [info(node).name for node in lowered.program.graph.nodes]
    assert [each for each in names if each.endswith(("/f32", "/bf16"))] == ["/grad.mm.0/f32", "/grad.mm.0/bf16"]


def test_a_gradient_of_which_both_axes_keep_parts_is_summed_over_both_at_once(tmp_path: Path) -> None:
    """One collective over all ranks can send most of the bytes between neighbours; one over dp alone could not."""
    decided = Decisions({"weight": S(1)}, OF_ROWS, (1,))
    file = tmp_path / "strategies.json"
    file.write_text(Strategies(mesh={"dp": 2, "tp": 2}, axes={"dp": decided, "tp": decided}).to_json())
    found = compare(LAYER, (2, 2), parallel_mode="auto", strategy_ckpt_load_file=file, gradients=False)
    assert found.layouts() == {"weight": "S(1) on dp, S(1) on tp"}
    details = [info(node).collective for node in found.program.collectives()]
    sums = [(each.kind, each.group, each.nbytes) for each in details if each.role == "gradient"]
    assert sums == [("reduce_scatter", "dp,tp", 128)]
