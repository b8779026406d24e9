"""The example project of a graph gate: its tests pass, and a change of its model fails as its README says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.testing.graphs import lowered

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "ci_graph_diff"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """pytester forgets what is imported while it is there, and parts of torch cannot be imported twice."""
    lowered().text()


@pytest.fixture
def example(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The project, in the folder in which pytester runs pytest. Its golden is that of the torch that runs here."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(EXAMPLE, pytester.path, ignore=ignored, dirs_exist_ok=True)
    (golden,) = pytester.path.glob("__graphs__/*.graph")
    version = torch.__version__.partition("+")[0]
    golden.write_text(re.sub(r"(?m)^# torch: .*$", f"# torch: {version}", golden.read_text(), count=1))
    return pytester


def run(example: pytest.Pytester, **outcomes: int) -> str:
    """What pytest prints, after a check of how the example's tests ended."""
    result = example.runpytest_inprocess("-p", "pytest_commfuse", "-p", "no:cacheprovider")
    result.assert_outcomes(**outcomes)
    assert result.ret == (1 if "failed" in outcomes else 0)
    return result.stdout.str()


def test_the_example_passes(example: pytest.Pytester) -> None:
    run(example, passed=3)


def test_a_change_of_its_model_is_found(example: pytest.Pytester) -> None:
    model = example.path / "model.py"
    model.write_text(model.read_text().replace("32, 64, 10, 16", "32, 128, 10, 16"))
    text = run(example, failed=1, passed=2)
    assert re.search(r"differs from its golden __graphs__/test_graph\.test_graph\.graph\ncompute changed: ", text)
    (command,) = re.findall(r"make the golden again: pytest (.*)", text)
    assert f"pytest {command}\n" in (EXAMPLE / "README.md").read_text()


def test_the_workflow_compares_the_goldens_that_there_are() -> None:
    workflow = (EXAMPLE / ".github" / "workflows" / "graph.yml").read_text()
    (pattern,) = re.findall(r"-- '\*(\S+)' > changed", workflow)
    assert [path.name for path in EXAMPLE.glob(pattern)] == ["test_graph.test_graph.graph"]
