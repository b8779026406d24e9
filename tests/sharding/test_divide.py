"""What dividing a graph makes of small steps: which collectives, where, and what `explain` says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf

OFF = {"openstate": False}


def lower(model: nn.Module, *args: torch.Tensor, mesh: tuple[int, ...] = (4,), **options: Any) -> cf.Lowered:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # gradients lie as their parameters do
    settings: dict[str, Any] = {"comm_fusion": OFF, "full_batch": True, "optimizer": optimizer, "mesh": mesh, **options}
    size = torch.Size(mesh).numel()
    return cf.compile(model, parallel_mode="semi_auto", device_num=size, **settings, form="step").lower(*args)


def collectives(lowered: cf.Lowered) -> list[tuple[str, str]]:
    return [(each.phase, each.kind) for each in lowered.collectives]


def lines(lowered: cf.Lowered, part: str) -> list[str]:
    return [line for line in lowered.text().splitlines() if part in line and not line.startswith("#")]


class Rows(nn.Module):
    """A step whose forward a test writes, with a few weights."""

    def __init__(self, forward: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x, *self.weights)


def test_without_marks_it_is_data_parallel() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    lowered = lower(model, torch.randn(8, 8), torch.randn(8, 4), loss_fn=nn.MSELoss())
    assert sorted(collectives(lowered)) == [("backward", "all_reduce")] * 4 + [("forward", "all_reduce")]
    gradients = [each for each in lowered.collectives if each.phase == "backward"]
    assert sorted(name for each in gradients for name in each.members) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(each.group == (0, 1, 2, 3) for each in lowered.collectives)


def test_axes_that_are_marked_alike_are_one() -> None:
    model = nn.Linear(8, 4)
    lowered = lower(model, torch.randn(8, 8), torch.randn(8, 4), mesh=(2, 2, 2), loss_fn=nn.MSELoss())
    assert all(len(each.group) == 8 for each in lowered.collectives)
    assert not lines(lowered, "axis_index(dp)")


def test_a_column_and_a_row_need_one_sum_each_way() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    cf.shard(model[0].weight, ("dp", None))  # the rest follows: its bias, and the rows of the other weight
    lowered = lower(model, torch.randn(8, 8), torch.randn(8, 8), loss_fn=nn.MSELoss())
    assert collectives(lowered) == [("forward", "all_reduce")]
    layouts = {each.name: each.placements for each in lowered.explain().layouts}
    assert layouts["0.weight"][0].startswith("S(0) on dp: ") and Path(__file__).name in layouts["0.weight"][0]
    assert layouts["0.bias"] == ("S(0) on dp: propagated",)
    assert layouts["2.weight"] == ("S(1) on dp: propagated",)
    assert layouts["2.bias"] == ()
    assert "R, as nothing asks for parts of them: 2.bias" in lowered.explain().text()


def test_a_partial_sum_with_two_readers_is_summed_once() -> None:
    def forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = (x @ up).relu() @ down
        return (y.sin() * y).sum()

    model = Rows(forward, (8, 16), (16, 8))
    cf.shard(model.weights[0], (None, "dp"))
    lowered = lower(model, torch.randn(8, 8))
    assert collectives(lowered) == [("forward", "all_reduce")]


def test_a_partial_sum_that_is_wanted_in_parts_is_scattered() -> None:
    def forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = (x @ up).relu() @ down
        return cf.shard(y, ("dp", None)).square().sum()

    model = Rows(forward, (8, 16), (16, 8))
    cf.shard(model.weights[0], (None, "dp"))
    lowered = lower(model, torch.randn(8, 8))
    assert ("forward", "reduce_scatter") in collectives(lowered)
    assert ("backward", "all_gather") in collectives(lowered)
    (change,) = [each for each in lowered.explain().redistributions if each.wanted == "S(0)" and each.have == "P"]
    assert change.nbytes == 8 * 8 * 4 and change.group == "dp"


def test_gradients_over_two_axes_are_reduced_once() -> None:
    def forward(x: torch.Tensor, scale: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return cf.shard(x * scale, ("dp", "tp", None)).matmul(up).tanh().sum()

    model = Rows(forward, (8,), (8, 8))
    lowered = lower(model, torch.randn(4, 4, 8), mesh=(2, 2))
    found = [each for each in lowered.collectives if each.phase == "backward"]
    assert [each.kind for each in found] == ["all_reduce"] * len(found)
    assert all(each.group == (0, 1, 2, 3) for each in found)


def test_a_part_of_a_sum_is_the_sum_of_parts() -> None:
    """The norm needs whole rows, so each rank computes whole gradients of the weights beside it, and keeps parts."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    cf.shard(model[0].weight, ("tp", None))
    cf.shard(model[2].weight, (None, "tp"))
    lowered = lower(model, torch.randn(4, 8), torch.randn(4, 4), mesh=(2, 2), loss_fn=nn.MSELoss())
    sent = {tuple(each.members): (each.group, each.bytes) for each in lowered.collectives if each.kind == "all_reduce"}
    assert sent[("0.weight",)] == ((0, 2), 4 * 16 * 8 / 2) and sent[("2.weight",)] == ((0, 2), 4 * 4 * 16 / 2)
    assert sent[("0.bias",)] == ((0, 2), 4 * 16 / 2)


def test_gathers_over_two_axes_are_one() -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.linalg.norm(x.matmul(weight).cumsum(-1))

    model = Rows(forward, (8, 8))
    cf.shard(model.weights[0], (None, ("dp", "tp")))
    lowered = lower(model, torch.randn(4, 8), mesh=(2, 2))
    gathers = [each for each in lowered.collectives if each.kind == "all_gather" and each.phase == "forward"]
    assert len(gathers) == 1 and gathers[0].group == (0, 1, 2, 3)


def test_a_fused_projection_is_divided_by_heads() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0].square().sum()

    model = Attends()
    cf.shard(attention.in_proj_weight, ("dp", None))
    cf.shard(attention.out_proj.weight, (None, "dp"))
    lowered = lower(model, torch.randn(4, 8, 16))
    layouts = {each.name: each.placements for each in lowered.explain().layouts}
    assert layouts["attention.in_proj_weight"][0].startswith("S(0;3) on dp")
    assert layouts["attention.in_proj_bias"] == ("S(0;3) on dp: propagated",)
    assert collectives(lowered) == [("forward", "all_reduce")]


def test_the_text_is_the_same_on_every_rank() -> None:
    texts = []
    for rank in range(4):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        cf.shard(model[0].weight, ("tp", None))
        optimizer = torch.optim.AdamW(model.parameters())
        step = cf.compile(
            model, loss_fn=nn.MSELoss(), optimizer=optimizer, parallel_mode="semi_auto", mesh=(2, 2), device_num=4,
            global_rank=rank,
        )  # fmt: skip
        texts.append(step.lower(torch.randn(4, 8), torch.randn(4, 4)).text())
    assert texts == [texts[0]] * 4
    assert "0.weight: f32[8,8]" in texts[0], "a rank's part"


def test_the_size_of_the_world_does_not_change_the_graph() -> None:
    counts = []
    for size in (8, 4096):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        cf.shard(model[0].weight, ("tp", None))
        x, y = torch.randn(size, 8), torch.randn(size, 4)
        counts.append(len(lower(model, x, y, mesh=(size // 4, 4), loss_fn=nn.MSELoss()).graph_module.graph.nodes))
    assert counts[0] == counts[1]


def test_bytes_of_an_exchange_are_what_one_rank_holds() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = cf.shard(self.first(x), ("dp", None))
            out: torch.Tensor = self.second(cf.shard(rows * 2, (None, "dp")))
            return out

    rows = torch.randn(256, 64)
    lowered = lower(Turned(), rows, rows, loss_fn=nn.MSELoss())
    exchanges = [each for each in lowered.collectives if each.kind == "all_to_all"]
    assert exchanges
    assert {each.bytes for each in exchanges} == {256 * 64 * 4 // 4}
