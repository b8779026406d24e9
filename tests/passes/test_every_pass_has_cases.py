"""Every pass has cases in text, in a file that is named as it is, in folders of the same names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from commfuse_fx.planning.pipeline.registry import PASSES


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_has_a_case_that_it_changes_and_one_that_it_leaves(name: str) -> None:
    folders = PASSES[name].make.__module__.split(".")[2:-1]
    tree = ast.parse(Path(__file__).parent.joinpath(*folders, f"test_{name}_text.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    after = [ast.unparse(call.args[2]) for call in calls if ast.unparse(call.func) in ("check", "assert_pass")]
    assert "None" in after and {*after} != {"None"}
