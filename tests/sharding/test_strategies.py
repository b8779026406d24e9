"""Files of strategies: what one run has searched, another one reads."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.placement import P, R
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.dividing.decisions import State
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.search import searched
from tests.oracle import OPTIMAL
from tests.sharding.test_search import SLOW_MEMORY
from tests.undrawn import undrawn

WIDE = 1024


def layers(width: int = WIDE, more: int = 0) -> Any:
    """Layers of a step that does not run."""
    extra = (nn.Linear(WIDE, WIDE) for _ in range(more))
    return undrawn(lambda: nn.Sequential(nn.Linear(WIDE, 4 * width), nn.ReLU(), nn.Linear(4 * width, WIDE), *extra))


def lowered(model: nn.Module, mesh: Any = None, **options: Any) -> Any:
    x = torch.empty(8, WIDE)
    options = {"parallel_mode": "auto", "cluster": "h100-node", "device_num": 8, "mesh": mesh, **options}
    optimizer = torch.optim.AdamW(model.parameters())
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options).lower(x, x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a file for `layers()`."""
    file = tmp_path_factory.mktemp("saved") / "strategies.json"
    lowered(layers(), strategy_ckpt_save_file=file)
    return file.read_text()


def not_applied(found: Any) -> dict[str, str]:
    notes = found.program.notes
    return {note.subject: note.reason for note in notes if note.topic == "strategy file, not applied"}


@pytest.mark.parametrize("mesh", [None, (2, 4)], ids=str)
def test_a_file_gives_the_same_graph(mesh: Any, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    first = lowered(layers(), mesh, strategy_ckpt_save_file=file)
    second = lowered(layers(), mesh, strategy_ckpt_load_file=file)
    assert first.text() == second.text() and "S(" in file.read_text()
    assert not_applied(second) == {}
    again = Strategies.load(file)
    assert again.to_json() == file.read_text()


def test_an_op_that_dividing_over_another_axis_has_replaced(tmp_path: Path) -> None:
    """A mean over parts is a sum over parts and a division, which cannot have the mean's strategy."""
    found = []
    for key in ("save", "load"):
        model = nn.Linear(16, 16)
        step = cf.compile(
            model,
            loss_fn=lambda output, wanted: (output * wanted).mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            parallel_mode="auto",
            search_mode="recursive_programming",
            mesh=(2, 2),
            device_num=4,
            cluster=SLOW_MEMORY,
            **{f"strategy_ckpt_{key}_file": tmp_path / "strategies.json", "strategy_ckpt_load_strict": key == "load"},
        )
        found.append(step.lower(torch.empty(8, 16), torch.empty(8, 16)))
    strategies = Strategies.load(tmp_path / "strategies.json").axes
    assert all(each.states["loss_fn/mean.0"].outputs == (P,) for each in strategies.values())
    assert found[0].text() == found[1].text() and not_applied(found[1]) == {}


def test_a_strategy_that_a_graph_cannot_have_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the op takes instead is. Dividing over one axis can leave an op without a strategy of another axis."""
    file = tmp_path / "strategies.json"
    original = searched.searched

    def with_another(*args: Any, **options: Any) -> list[Axis]:
        states = {"2/addmm.0": State((P,), (P, P, R))}
        return [replace(axis, states={**axis.states, **states}) for axis in original(*args, **options)]

    with monkeypatch.context() as patch:
        patch.setattr(searched, "searched", with_another)
        first = lowered(layers(), (8,), strategy_ckpt_save_file=file)
    second = lowered(layers(), (8,), strategy_ckpt_load_file=file, strategy_ckpt_load_strict=True)
    assert first.text() == second.text()
    assert "2/addmm.0" in file.read_text() and "P, P, R -> P" not in file.read_text()


def test_a_plan_of_the_batch_alone_is_kept_too(tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    x = torch.empty(16384, 16)

    def on_batch(**options: Any) -> Any:
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"parallel_mode": "auto", "cluster": "h100-node", "device_num": 4, **options}
        return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options).lower(x, x)

    first = on_batch(strategy_ckpt_save_file=file)
    assert first.text() == on_batch(strategy_ckpt_load_file=file).text()


def test_a_file_is_that_of_the_first_training_step(tmp_path: Path) -> None:
    """An evaluation ahead of it decides nothing, and other shapes follow it."""
    file = tmp_path / "strategies.json"
    model = layers()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.empty(8, WIDE)
    options = {"parallel_mode": "auto", "cluster": "gloo-1gbit", "device_num": 8, "mesh": (8,)}
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, strategy_ckpt_save_file=file, **options)
    model.eval()
    alone = step.lower(x, x)
    assert not file.exists()
    model.train()
    first = step.lower(x, x)
    text = file.read_text()
    assert first.text() == lowered(layers(), (8,), cluster="gloo-1gbit").text()
    assert parts(first) != parts(alone)
    more = torch.empty(4096, WIDE)
    step.lower(more, more)
    model.eval()
    assert parts(step.lower(x, x)) == parts(first)
    assert file.read_text() == text


def parts(found: Any) -> dict[str, Any]:
    return {name: param.layout for name, param in found.program.params.items()}


def test_an_entry_that_a_mark_contradicts_is_listed(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(saved)
    model = cf.shard(layers(), "0.weight", (None, "dp"))
    found = lowered(model, strategy_ckpt_load_file=file)
    assert "S(0) on dp" in not_applied(found)["0.weight"] and "S(1)" in not_applied(found)["0.weight"]
    assert str(dict(found.program.params["0.weight"].layout)["dp"]) == "S(1)"


def test_a_file_has_a_line_for_each_decision(saved: str) -> None:
    lines = [line.strip().rstrip(",") for line in saved.splitlines()]
    assert '"0.weight": "dp: S(0)"' in lines and '"0/addmm.0": "dp: S(0), R, S(1) -> S(1)"' in lines


def test_a_changed_model_takes_what_still_fits(saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(saved)
    lowered(layers(), strategy_ckpt_load_file=file)
    assert not caplog.records
    changed = layers(more=1)
    found = lowered(changed, strategy_ckpt_load_file=file)
    told = not_applied(found)
    assert told["3.weight"] == "on dp: the file has no entry for it; whole" and "0.weight" not in told
    assert "fits the step in part: 3.weight: on dp: the file has no entry for it; whole" in caplog.text
    assert found.program.params["0.weight"].layout and not found.program.params["3.weight"].layout


def test_what_the_model_no_longer_has_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    lowered(layers(more=1), strategy_ckpt_save_file=file)
    told = not_applied(lowered(layers(), strategy_ckpt_load_file=file))
    assert told["3.weight"].endswith("the model has no such parameter")
    assert told["3/addmm.0"] == "on dp: the step has no such op"


def test_a_file_of_another_model_is_refused(saved: str, tmp_path: Path) -> None:
    """Nothing of it would be applied but to the loss, and all that the file divides would be whole."""
    file = tmp_path / "strategies.json"
    file.write_text(saved)
    with pytest.raises(ConfigValueError, match=r"is of another model: .* \(0.weight, 0.bias, .*\), but inner.0.weight"):
        lowered(nn.Sequential(OrderedDict(inner=layers())), strategy_ckpt_load_file=file)


def test_a_parameter_that_no_longer_divides_is_whole(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(saved)
    found = lowered(layers(width=WIDE + 1), strategy_ckpt_load_file=file)
    assert "does not divide so by 8" in not_applied(found)["0.weight"]
    assert not found.program.params["0.weight"].layout


def test_a_strategy_that_an_op_does_not_have_is_listed(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(saved.replace("dp: S(0), R, S(1) -> S(1)", "dp: S(1), R, S(1) -> S(0)", 1))
    told = not_applied(lowered(layers(), strategy_ckpt_load_file=file))
    assert told == {"0/addmm.0": "on dp: the op cannot have this strategy"}


def test_a_file_that_does_not_fit_is_refused_where_that_is_asked_for(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(saved)
    strict = {"strategy_ckpt_load_file": file, "strategy_ckpt_load_strict": True}
    assert lowered(layers(), **strict).text() == lowered(layers(), strategy_ckpt_load_file=file).text()
    with pytest.raises(ConfigValueError) as raised:
        lowered(layers(more=1), **strict)
    assert "3.weight: on dp: the file has no entry for it; whole" in str(raised.value)
    with pytest.raises(ConfigValueError, match="2.weight: S.1. on dp: .* does not divide so by 8.* and 8 more. Search"):
        lowered(layers(width=WIDE + 1), **strict)


def test_buckets_are_those_of_the_plan_that_was_found(tmp_path: Path) -> None:
    """A file that says nothing of the plan leaves it to the run that reads it, which compares more than a search."""

    def found(**options: Any) -> Any:
        deep = nn.Sequential(*(each for _ in range(4) for each in layers()))
        return lowered(deep, (8,), comm_fusion=OPTIMAL, **options)

    file, again = tmp_path / "strategies.json", tmp_path / "again.json"
    first = found(strategy_ckpt_save_file=file)
    assert found(strategy_ckpt_load_file=file, strategy_ckpt_save_file=again).text() == first.text()
    assert again.read_text() == file.read_text()
    data = json.loads(file.read_text())
    del data["plan"]
    file.write_text(json.dumps(data))
    assert found(strategy_ckpt_load_file=file).text() != first.text()


def test_a_plan_that_is_not_offered_is_listed(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    file.write_text(json.dumps({**json.loads(saved), "plan": {"postponed": 0.3}}))
    found = lowered(layers(), strategy_ckpt_load_file=file, comm_fusion=OPTIMAL)
    told = {"plan": "postponed=0.3: plans with these options are not compared for this step"}
    assert not_applied(found) == told and '"plan"' not in saved
    options = {"strategy_ckpt_load_file": file, "strategy_ckpt_load_strict": True}
    with pytest.raises(ConfigValueError, match=r"does not fit the step: plan: postponed=0.3"):
        lowered(layers(), comm_fusion=OPTIMAL, **options)


def test_strict_needs_a_file() -> None:
    with pytest.raises(ConfigValueError, match="strategy_ckpt_load_strict=True without strategy_ckpt_load_file"):
        lowered(layers(), strategy_ckpt_load_strict=True)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda data: data.update(schema=2), ConfigValueError, "reads schemas up to 1"),
        (lambda data: data.pop("ops"), ConfigKeyError, 'key "ops" is missing'),
        (lambda data: data["ops"].update({"0/addmm.0": "S(0)"}), ConfigValueError, "ops['0/addmm.0'] has 'S(0)'"),
        (lambda data: data["ops"].update({"0/addmm.0": "dp: S(0)"}), ConfigValueError, 'give inputs, "->" and results'),
        (lambda data: data["parameters"].update({"0.bias": "tp: R"}), ConfigValueError, "parameters['0.bias']"),
        (lambda data: data["parameters"].update({"0.bias": "dp: Q"}), ConfigValueError, "parameters['0.bias'] has 'Q'"),
        (lambda data: data["parameters"].update({"0.bias": "dp: S(-1)"}), ConfigValueError, "['0.bias'] has 'S(-1)'"),
        (lambda data: data["ops"].update({"0/addmm.0": "dp: R -> S(0;0)"}), ConfigValueError, "has 'S(0;0)'; give"),
        (lambda data: data["ops"].update({"0/addmm.0": "dp: R -> "}), ConfigValueError, "['0/addmm.0'] has ''; give"),
        (lambda data: data.update(mesh={}), ConfigValueError, "but mesh has no axes"),
        (lambda data: data["parameters"].update({"0.bias": 3}), ConfigTypeError, "give a str"),
        (lambda data: data["parameters"].update({"0.bias": "dp: P"}), ConfigValueError, "0.bias'] is P, a partial sum"),
        (lambda data: data["parameters"].update({"0.bias": "dp: R; dp: R"}), ConfigValueError, "has axis dp twice"),
        (lambda data: data["mesh"].update({"dp": 4}), ConfigValueError, "the mesh dp=4, but the step has dp=8"),
        (lambda data: data["blocks"].update({"tp": [1]}), ConfigValueError, "blocks has axis 'tp'"),
        (
            lambda data: data.update(plan={"postponed": "1"}),
            ConfigValueError,
            "plan['postponed'] is '1'; give a number",
        ),
        (lambda data: data["blocks"].update({"dp": []}), ConfigValueError, "give a list of numbers"),
    ],
)
def test_bad_files(change: Change, error: type[Exception], said: str, saved: str, tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"
    data = json.loads(saved)
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(error) as raised:
        lowered(layers(), strategy_ckpt_load_file=file)
    assert said in str(raised.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema": 1, "kind": "strat')
    for path in (damaged, tmp_path / "none.json"):
        with pytest.raises(ConfigValueError, match=path.name):
            lowered(layers(), strategy_ckpt_load_file=path)
    with pytest.raises(
        ConfigValueError, match="is no regular file; give strategy_ckpt_load_file the path of a file that"
    ):
        lowered(layers(), strategy_ckpt_load_file=tmp_path)
    with pytest.raises(
        ConfigValueError, match="^strategy_ckpt_load_file='.*damaged.json' with parallel_mode=.semi_auto."
    ):
        lowered(layers(), parallel_mode="semi_auto", strategy_ckpt_load_file=damaged)


def test_a_file_that_cannot_be_written_is_an_error_ahead_of_the_search(tmp_path: Path) -> None:
    for file, said in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "is a folder: give the name")):
        with pytest.raises(ConfigValueError, match=f"strategy_ckpt_save_file .*{said}"):
            cf.compile(layers(), loss_fn=F.mse_loss, parallel_mode="auto", device_num=8, strategy_ckpt_save_file=file)


def test_calls_on_parts_of_the_batch_are_no_decisions(tmp_path: Path) -> None:
    file = tmp_path / "strategies.json"

    def normed(**options: Any) -> Any:
        model = layers()
        model[1] = cf.shard(nn.BatchNorm1d(4 * WIDE), cross_batch=True)
        return lowered(model, (2, 4), **options)

    first = normed(strategy_ckpt_save_file=file)
    second = normed(strategy_ckpt_load_file=file)
    assert first.text() == second.text() and not_applied(second) == {}
    assert "1/sum.0" not in Strategies.load(file).to_json() and '"1.weight"' in file.read_text()


def test_a_plan_of_a_later_round_stays_when_it_is_read_and_when_it_is_planned_again() -> None:
    torch.manual_seed(0)
    pairs = ((nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)) for _ in range(2))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"parallel_mode": "auto", "cluster": "h100-ib-8", "device_num": 64, "mesh": (64,)}
    step, x = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options), torch.empty(8, 256)
    call = step.planner.take_apart((x, x), {})
    plan = step.planner.plan(call)
    program, found = plan.compiled.program, plan.compiled.program.strategies
    assert not any("exposed=''" in str(each) for each in plan.compiled.pipeline.passes), "an example of such a plan"
    assert step.lower(x, x).text() == canonical_text(program)
    step.planner.replan(plan, call, LayoutConflict("separate", "an example"))
    assert plan.compiled.program is not program
    assert plan.compiled.program.strategies.to_json() == found.to_json()
