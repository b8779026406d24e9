"""The rows of the report's picture of layouts; tests/browser looks at it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.report.data import report_data
from commfuse_fx.inspect.report.layouts import layout_picture
from commfuse_fx.ir.json.read import from_json


class Layers(nn.Module):
    """Equal layers, of which the last two are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x


def divided(mesh: tuple[int, ...] = (2, 4), **options: Any) -> cf.Lowered:
    model = Layers()
    for number in (3, 4):
        cf.shard(model, f"h.{number}.0", weight=("tp", None))
        cf.shard(model, f"h.{number}.2", weight=(None, "tp"))
    options = {"parallel_mode": "semi_auto", **options}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=sgd, mesh=mesh, device_num=8, **options)
    return step.lower(torch.ones(4, 8), torch.ones(4, 8))


def test_layouts_of_repeated_layers_are_one_row() -> None:
    picture = report_data(divided(), None, None).layouts
    assert picture is not None and picture.axes == (("dp", 2), ("tp", 4))
    rows = {(row.name, row.kind): row for row in picture.rows}
    plain, marked = rows["h.0-2.0.weight", "parameter"], rows["h.3-4.0.weight", "parameter"]
    assert (plain.count, plain.value, plain.cells, plain.nbytes, plain.on_rank) == (
        3,
        "f32[16,8]",
        ("R", "R"),
        512,
        512,
    )
    assert (marked.count, marked.cells, marked.nbytes, marked.on_rank) == (2, ("R", "S(0)"), 512, 128)
    assert rows["h.3-4.2.weight", "parameter"].cells == ("R", "S(1)")
    inner = rows["h.3-4.0", "result"]
    assert (inner.value, inner.cells, inner.nbytes, inner.on_rank) == ("f32[8,16]", ("S(0)", "S(1)"), 512, 64)
    assert rows["h.0-2.0", "result"].cells == ("S(0)", "R")
    names = [row.name for row in picture.rows]
    assert names.index("h.0-2.0.weight") < names.index("h.0-2.0.bias") < names.index("h.0-2.2.weight")


def test_layouts_are_those_of_a_saved_graph() -> None:
    lowered = divided()
    assert layout_picture(from_json(lowered.to_json(), "here")) == layout_picture(lowered.program)


def test_a_graph_that_is_not_divided_has_no_picture() -> None:
    assert report_data(divided((8,), parallel_mode="data_parallel"), None, None).layouts is None


def test_values_of_parts_of_the_batch_are_shown_as_such() -> None:
    model = cf.shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), cross_batch=True)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, form="step", parallel_mode="auto", device_num=4)
    picture = layout_picture(step.lower(torch.ones(4, 8), torch.ones(4, 8)).program)
    assert picture is not None
    (row,) = (row for row in picture.rows if (row.name, row.kind) == ("1", "result"))
    assert row.cells[0] == "own" and row.on_rank == row.nbytes == 128
