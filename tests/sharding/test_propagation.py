"""search_mode="sharding_propagation": marks say over which axes a model is divided, and a search completes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.config.options import SEARCH_MODES
from commfuse_fx.sharding.dividing.strategies import NOT_APPLIED
from tests.models import CONV, MLP_CASE, TIED, Case
from tests.sharding.divided_oracle import compare, divided

MODE = {"parallel_mode": "auto", "search_mode": "sharding_propagation"}

WIDTH = 1024


def lowered(mark: Callable[[nn.Module], object], mesh: tuple[int, ...] | None = (2, 4), **options: Any) -> Any:
    layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    mark(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {**MODE, "cluster": "h100-node", **options}
    x = torch.empty(64, WIDTH)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, mesh=mesh, device_num=8, **options)
    return step.lower(x, x)


def layouts(found: Any) -> dict[str, str]:
    params = found.program.params.items()
    return {
        name: ", ".join(f"{each} on {axis}" for axis, each in param.layout) for name, param in params if param.layout
    }


def sent(found: Any) -> list[tuple[str, tuple[int, ...], int]]:
    return [(each.kind, each.group, each.bytes) for each in found.collectives]


@pytest.mark.parametrize("mesh", [None, (2, 4)], ids=str)
def test_without_marks_it_is_data_parallel(mesh: tuple[int, ...] | None) -> None:
    found = lowered(lambda model: None, mesh)
    assert sent(found) == sent(
        lowered(lambda model: None, mesh, parallel_mode="semi_auto", search_mode=SEARCH_MODES[0])
    )
    assert not layouts(found)
    assert "nothing is searched, as no mark divides the model over a mesh axis" in found.explain().text()


def test_one_device() -> None:
    x = torch.empty(4, 8)
    step = cf.compile(nn.Linear(8, 8), loss_fn=F.mse_loss, parallel_mode="auto")
    assert "the whole step: nothing is searched, as there is one device" in step.lower(x, x).explain().text()


@pytest.mark.parametrize(("name", "strategy"), [("0", ("tp", None)), ("5", (None, "tp"))])
def test_marks_reach_layers_before_and_behind_them(name: str, strategy: Any) -> None:
    found = lowered(lambda model: cf.shard(model, name, weight=strategy))
    parts = {key: value for key, value in layouts(found).items() if key.endswith("weight")}
    assert parts == {
        "0.weight": "S(0) on tp",
        "2.weight": "S(1) on tp",
        "3.weight": "S(0) on tp",
        "5.weight": "S(1) on tp",
    }
    over_tp = [(kind, nbytes) for kind, group, nbytes in sent(found) if len(group) == 4 and nbytes > 4 * WIDTH]
    assert over_tp == [("all_reduce", 64 * WIDTH * 4)] * 3
    assert any("of communication" in note.reason for note in found.program.notes if note.topic == "search")


def test_the_batch_is_divided_over_axes_without_marks() -> None:
    """As in semi_auto, so that ranks are handed the same parts of it."""
    found = lowered(lambda model: cf.shard(model, "0", weight=("tp", None)))
    assert found.program.batch_axes == "dp"
    assert (
        lowered(lambda model: cf.shard(model, "0", weight=("tp", None)), search_mode=SEARCH_MODES[0]).program.batch_axes
        == "dp,tp"
    )


def test_a_marked_parameter_is_not_gathered() -> None:
    """Moving the activations of so many rows takes longer."""
    layer = nn.Linear(16, 16, bias=False)
    cf.shard(layer, weight=("dp", None))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.empty(4096, 16)
    options = {**MODE, "cluster": "gloo-1gbit", "mesh": (2,), "device_num": 2, "form": "step"}
    found = cf.compile(layer, loss_fn=F.mse_loss, optimizer=optimizer, **options).lower(x, x)
    assert layouts(found) == {"weight": "S(0) on dp"}
    assert all(each.bytes >= x.nbytes or each.bytes == 4 for each in found.collectives)


def test_a_file_gives_the_same_graph(tmp_path: Path) -> None:
    def mark(model: nn.Module) -> None:
        cf.shard(model, "0", weight=("tp", None))

    file = tmp_path / "strategies.json"
    found = lowered(mark, strategy_ckpt_save_file=file)
    again = lowered(mark, strategy_ckpt_load_file=file)
    assert again.text() == found.text()
    assert [note for note in again.program.notes if "not applied" in note.topic] == []


MARKS: dict[str, dict[str, Callable[[nn.Module], object]]] = {
    "mlp": {
        "columns": lambda model: cf.shard(model, "0", weight=("tp", None)),
        "rows": lambda model: cf.shard(model, "4", weight=(None, "tp")),
        "activation": lambda model: cf.shard(model, "2", out_strategy=((None, "tp"),)),
        "both axes": lambda model: cf.shard(model, "0", weight=("tp", "dp")),
    },
    "conv": {
        "channels": lambda model: cf.shard(model, "conv1.weight", ("tp", None, None, None)),
        "inputs": lambda model: cf.shard(model, "conv2.weight", (None, "tp", None, None)),
    },
    "tied": {
        "columns": lambda model: cf.shard(model, "embed.weight", (None, "tp")),
        "mix": lambda model: cf.shard(model, "mix.weight", ("tp", None)),
    },
}


@cache
def layouts_of_marks(case: Case, name: str) -> frozenset[str]:
    """The parameters that a mark divides, without a search."""
    wanted = divided(case, case.model(), (2, 2), MARKS[case.name][name])
    wanted.run(*case.batches(1, 8))
    notes = wanted.program.notes
    return frozenset(each.subject for each in notes if each.topic == "layout" and "propagated" not in each.reason)


@pytest.mark.parametrize(
    ("case", "name", "mode"),
    [
        *((case, name, "sharding_propagation") for case in (MLP_CASE, CONV, TIED) for name in MARKS[case.name]),
        # Marks become the same pins in all modes: each kind of them is held in one of the others.
        (MLP_CASE, "columns", "dynamic_programming"),
        (MLP_CASE, "activation", "dynamic_programming"),
        (MLP_CASE, "rows", "recursive_programming"),
        (MLP_CASE, "both axes", "recursive_programming"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_equals_one_device_and_keeps_marks(case: Case, name: str, mode: str) -> None:
    mark = MARKS[case.name][name]
    options = {**MODE, "search_mode": mode}
    found = compare(case, (2, 2), mark, cluster="h100-node", gradients=False, steps=2, **options)
    kept = {each: found.layouts().get(each, "").count("S(") for each in layouts_of_marks(case, name)}
    assert all(kept.values()) and bool(kept) == (name != "activation")


@pytest.mark.parametrize("mode", SEARCH_MODES)
def test_marks_that_contradict(mode: str) -> None:
    def mark(model: nn.Module) -> None:
        cf.shard(model, "0", weight=("tp", None))
        cf.shard(model, "*.weight", (None, "tp"))

    with pytest.raises(cf.ConfigValueError) as raised:
        lowered(mark, search_mode=mode)
    message = str(raised.value)
    assert "two marks give parameter 0.weight two layouts" in message and message.count("test_propagation.py") == 2
    assert "give both the same layout, or remove one" in message


class Narrow(nn.Module):
    """A bias and a tensor that two axes cannot divide together."""

    def __init__(self, of_tensor: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2), nn.Linear(2, 2)
        self.of_tensor = of_tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.last(x if self.of_tensor is None else cf.shard(x, self.of_tensor))


NARROW = Case("narrow", Narrow, lambda rows: (torch.randn(rows, 4), torch.randn(rows, 2)), F.mse_loss)
MARKED_TENSOR = {axis: replace(NARROW, build=partial(Narrow, {axis: "S(1)"})) for axis in ("dp", "tp")}


@pytest.mark.parametrize("mode", ["semi_auto", *SEARCH_MODES])
@pytest.mark.parametrize(("one", "other"), [("dp", "tp"), ("tp", "dp")])
def test_what_is_not_marked_leaves_room_for_marks(one: str, other: str, mode: str) -> None:
    """The weight is divided over one axis. A bias or a result that goes with it could not be divided over the other."""
    options = {"parallel_mode": mode} if mode == "semi_auto" else {**MODE, "search_mode": mode}
    for case, name in ((NARROW, "first.bias"), (MARKED_TENSOR[other], "last.bias")):

        def mark(model: nn.Module, name: str = name) -> None:
            cf.shard(model, {"first.weight": {one: "S(0)"}, name: {other: "S(0)"}})

        found = compare(case, (2, 2), mark, cluster="gloo-1gbit", gradients=False, steps=2, **options)
        layouts = found.layouts()
        assert f"S(0) on {one}" in layouts["first.weight"] and f"S(0) on {other}" in layouts[name]


def test_an_entry_for_what_dividing_over_another_axis_has_made(tmp_path: Path) -> None:
    """It is listed where the op cannot have its strategy: the step had no such op before it was divided."""
    file = tmp_path / "strategies.json"

    def found(**options: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        cf.shard(model, "0.weight", {"tp": "S(0)"})
        step = cf.compile(
            model,
            loss_fn=lambda output, wanted: (output * wanted).mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=(2, 2),
            device_num=4,
            **MODE,
            **options,
        )
        return step.lower(torch.empty(4, 4), torch.empty(4, 4))

    found(strategy_ckpt_save_file=file)
    data = json.loads(file.read_text())
    name = next(each for each in data["ops"] if "/step." in each)
    data["ops"][name] = "tp: P -> S(0)"
    file.write_text(json.dumps(data))
    notes = found(strategy_ckpt_load_file=file).program.notes
    told = {note.subject: note.reason for note in notes if note.topic == NOT_APPLIED}
    assert told == {name: "on tp: the op cannot have this strategy"}
