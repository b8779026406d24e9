"""`cf.diff` and `commfuse diff` of two files of strategies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import commfuse_fx as cf
from commfuse_fx.cli import main
from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.sharding.dividing.decisions import Decisions, State
from commfuse_fx.sharding.dividing.strategies import Strategies

COLUMN = S(0)


def strategies(layers: int = 3, column: Any = COLUMN, head: Any = R, extra: str = "", ways: int = 8) -> str:
    """The text of a file for some equal layers and a head."""
    parameters: dict[str, Any] = {f"h.{number}.up.weight": column for number in range(layers)} | {"head.weight": head}
    parameters |= {extra: R} if extra else {}
    states = {f"h.{number}/addmm.0": State((column,), (R, column)) for number in range(layers)}
    return Strategies(mesh={"dp": ways}, axes={"dp": Decisions(parameters, states)}).to_json()


def test_equal_files_are_the_same() -> None:
    found = cf.diff(strategies(), strategies())
    assert found.is_same and found.text().splitlines()[0] == "the same strategies (7 entries)"


def test_another_level_of_the_parallel_optimizer_is_a_difference() -> None:
    other = Strategies.from_json(strategies())
    found = cf.diff(strategies(), replace(other, level=2).to_json())
    assert not found.is_same and "the whole step\n  + parallel_optimizer: 2\n" in found.text()


def test_what_differs_alike_is_one_line() -> None:
    found = cf.diff(strategies(), strategies(column=S(1), head=S(0), extra="new.bias", ways=4))
    assert not found.is_same and found.text() == (
        "strategies changed: 5 parameters, 3 ops (7 -> 8 entries)\n"
        "- a\n"
        "+ b\n"
        "the whole step\n"
        "  mesh: dp=8 => dp=4\n"
        "parameters\n"
        "  h.*.up.weight (3): dp: S(0) => dp: S(1)\n"
        "  head.weight: dp: R => dp: S(0)\n"
        "  + new.bias: dp: R\n"
        "ops\n"
        "  h.*/addmm.0 (3): dp: R, S(0) -> S(0) => dp: R, S(1) -> S(1)\n"
    )


def test_layers_that_differ_in_other_ways_stand_alone() -> None:
    found = cf.diff(strategies(layers=3), strategies(layers=2))
    assert [(each.name, each.count, each.after) for each in found.parameters] == [("h.2.up.weight", 1, None)]
    assert "- h.2.up.weight: dp: S(0)" in found.text()


def test_forms_for_programs_and_pull_requests() -> None:
    found = cf.diff(strategies(), strategies(column=S(1), extra="```<b>"))
    data = json.loads(found.to_json())
    assert data["schema"] == 1 and data["is_same"] is False
    assert data["ops"] == [
        {"name": "h.*/addmm.0", "count": 3, "before": "dp: R, S(0) -> S(0)", "after": "dp: R, S(1) -> S(1)"}
    ]
    assert "````text\n" in found.markdown() and "<summary>parameters</summary>" in found.markdown()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, text in (("old.json", strategies()), ("new.json", strategies(head=S(0))), ("copy", strategies())):
        (tmp_path / name).write_text(text)
        files.append(str(tmp_path / name))
    old, new, copy = files
    assert main(["diff", old, copy]) == 0
    assert main(["diff", old, new]) == 1
    assert capsys.readouterr().out.endswith(f"- {old}\n+ {new}\nparameters\n  head.weight: dp: R => dp: S(0)\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (strategies()[:120], "line "),
        (strategies().replace('"schema": 1', '"schema": 2'), "reads schemas up to 1"),
        ("# schema: 1\n", "not JSON"),
        (None, "there is no file"),
    ],
)
def test_the_other_file_is_none(content: str | None, said: str, tmp_path: Path, capsys: Any) -> None:
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    good.write_text(strategies())
    if content is not None:
        other.write_text(content)
    for pair in ((good, other), (other, good)):
        assert main(["diff", *map(str, pair)]) == 2
        error = capsys.readouterr().err
        assert said in error and "other.json" in error


def test_a_graph_and_strategies_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigValueError, match="but the other one is a file of strategies"):
        cf.diff(tmp_path, strategies())
