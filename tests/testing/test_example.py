"""The example project of a graph gate: its tests pass, and a change of its model fails as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "ci_graph_diff"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "pytest_commfuse", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, check=False, timeout=300)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_example_passes(example: Path) -> None:
    done = run(example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_change_of_its_model_is_found(example: Path) -> None:
    model = example / "model.py"
    model.write_text(model.read_text().replace("32, 64, 10, 16", "32, 128, 10, 16"))
    done = run(example)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert re.search(
        r"differs from its golden __graphs__/test_graph\.test_graph\.graph\ncompute changed: ", done.stdout
    )
    (command,) = re.findall(r"make the golden again: pytest (.*)", done.stdout)
    assert f"pytest {command}\n" in (EXAMPLE / "README.md").read_text()


def test_the_workflow_compares_the_goldens_that_there_are() -> None:
    workflow = (EXAMPLE / ".github" / "workflows" / "graph.yml").read_text()
    (pattern,) = re.findall(r"-- '\*(\S+)' > changed", workflow)
    assert [path.name for path in EXAMPLE.glob(pattern)] == ["test_graph.test_graph.graph"]
