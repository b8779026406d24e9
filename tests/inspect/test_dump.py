"""The files of a dump: whole, deterministic, and nobody else's touched; and COMMFUSE_DUMP."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect import on_compile
from tests.inspect.steps import Net, train

CUT = {"allreduce": {"mode": "index", "config": [2, 6]}}


@pytest.fixture(scope="module")
def lowered() -> cf.Lowered:
    return train(Net())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_in_it(lowered: cf.Lowered, tmp_path: Path) -> None:
    folder = lowered.dump(tmp_path / "new" / "folder")
    assert folder == tmp_path / "new" / "folder" / "rank0"
    index = json.loads((folder / "index.json").read_text())
    assert (index["schema"], index["rank"], index["fingerprint"]) == (1, 0, lowered.fingerprint)
    named = [*index["files"], *(stage["file"] for stage in index["stages"])]
    assert sorted([*named, "index.json"]) == list(files(folder)), "the index names every file"
    assert all(index["files"].values())
    assert [index[role] for role in ("text", "json", "captured", "explain", "dot", "report")] == list(index["files"])

    assert (folder / "graph.txt").read_text() == lowered.text()
    assert (folder / "graph.json").read_text() == lowered.to_json()
    assert (folder / "explain.txt").read_text() == lowered.explain().text()
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (folder / "graph.dot").read_text().startswith("digraph")
    captured = json.loads((folder / "captured.json").read_text())["nodes"]
    assert len(captured) == lowered.pass_records[0].nodes_before
    assert [(s["pass"], s["modified"]) for s in index["stages"]] == [(n, s.modified) for n, s in lowered.stages.items()]
    for stage in index["stages"]:
        assert (folder / stage["file"]).read_text() == lowered.stages[stage["pass"]].text()
    assert cf.diff(lowered, folder).is_same and cf.diff(lowered, folder.parent).is_same


def test_two_dumps_are_byte_identical(lowered: cf.Lowered, tmp_path: Path) -> None:
    again = train(Net())
    assert files(lowered.dump(tmp_path / "one")) == files(again.dump(tmp_path / "other"))


def test_a_dump_over_an_old_one_leaves_no_stale_files(lowered: cf.Lowered, tmp_path: Path) -> None:
    train(Net(), cluster="gloo-1gbit").dump(tmp_path)  # of another schedule, so of other stages
    folder = tmp_path / "rank0"
    (folder / "stages" / "99-mine.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    lowered.dump(tmp_path)
    found = files(folder)
    assert found.pop("notes.txt") == found.pop("stages/99-mine.txt") == b"mine"
    assert found == files(lowered.dump(tmp_path / "fresh"))


@pytest.mark.parametrize(
    "index",
    [
        {"files": {"../../other.txt": "", "/etc/hostname": ""}, "stages": [{"file": "../../other.txt"}, 3, {}]},
        {"files": ["graph.txt"], "stages": {"file": "stages/00-a.txt"}},
        {"stages": [{"file": "stages/../../../other.txt"}, {"file": ["a"]}]},
        [],
        "damaged",
    ],
)
def test_an_index_cannot_have_other_files_removed(lowered: cf.Lowered, tmp_path: Path, index: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    lowered.dump(tmp_path)
    assert other.read_text() == "mine"
    assert cf.diff(lowered, tmp_path).is_same


def test_an_interrupted_dump_is_no_dump(lowered: cf.Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered.dump(tmp_path)
    real = os.replace

    def interrupted(source: Any, target: Any) -> None:
        if Path(target).name == "graph.json":
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("commfuse_fx.support.writing.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lowered.dump(tmp_path)
    assert not [name for name in files(tmp_path) if name.endswith(".part")]
    with pytest.raises(cf.ConfigValueError, match="neither index.json nor rank"):
        cf.diff(tmp_path / "rank0", lowered)
    lowered.dump(tmp_path)
    assert cf.diff(tmp_path, lowered).is_same


def test_a_folder_that_cannot_be_written(lowered: cf.Lowered, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "nul\0byte"):
        with pytest.raises(cf.ConfigValueError, match="the dump cannot be written to .*rank0.*give a folder"):
            lowered.dump(place)


# COMMFUSE_DUMP


def step_of(model: nn.Module, **options: Any) -> cf.CompiledStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, **options)


def test_every_compile_of_a_run_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_DUMP", str(tmp_path))
    model = nn.Linear(8, 8)
    step = step_of(model)
    for rows in (4, 4, 6):
        step(torch.ones(rows, 8), torch.ones(rows, 8))
    model.eval()
    step(torch.ones(4, 8), torch.ones(4, 8))
    folders = ["000-train", "001-train", "002-eval"]
    assert sorted(path.name for path in tmp_path.iterdir()) == folders
    assert all(json.loads((tmp_path / name / "rank0/index.json").read_text())["captured"] for name in folders)
    assert all(plan.compiled.captured is None for plan in step.planner.plans.values()), "kept no longer than needed"
    model.train()
    assert cf.diff(step.lower(torch.ones(6, 8), torch.ones(6, 8)), tmp_path / "001-train").is_same


def test_a_rank_of_a_virtual_world_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_DUMP", str(tmp_path))
    step_of(nn.Linear(8, 8), device_num=4, global_rank=3).lower(torch.ones(4, 8), torch.ones(4, 8))
    assert [path.name for path in (tmp_path / "000-train").iterdir()] == ["rank3"]


def test_without_the_variable_nothing_is_kept_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMFUSE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_compile, "_dump", None)
    step = step_of(nn.Linear(8, 8))
    step(torch.ones(4, 8), torch.ones(4, 8))
    assert [plan.compiled.captured for plan in step.planner.plans.values()] == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_fails_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMMFUSE_DUMP", str(tmp_path / "file"))
    monkeypatch.setattr(on_compile, "_warned", False)
    step = step_of(nn.Linear(8, 8))
    with caplog.at_level(logging.WARNING, "commfuse_fx"):
        for rows in (4, 6):
            assert step(torch.ones(rows, 8), torch.ones(rows, 8)).isfinite()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "commfuse_fx.dump"]
    assert message.startswith("COMMFUSE_DUMP: ConfigValueError: the dump cannot be written to ")
