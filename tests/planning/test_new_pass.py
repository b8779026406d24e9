"""docs/writing-a-pass.md, followed to the letter on a copy of the package, gives a new pass by touching two files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/writing-a-pass.md").read_text()
FILE, TABLE = "passes/schedule/wait_at_once.py", "commfuse_fx/planning/pipeline/pass_table.py"

LIST = """
from commfuse_fx.cli import main
assert main(["opt", "--list"]) == 0
"""

COMPILE = """
import torch, commfuse_fx as cf
model = torch.nn.Linear(4, 4)
step = cf.compile(model, loss_fn=torch.nn.functional.mse_loss, device_num=2, schedule="none")
print(*step.lower(torch.ones(2, 4), torch.ones(2, 4)).stages)
"""

BREAK = "---- and then ----"

CHECK = """
from commfuse_fx.passes.schedule.wait_at_once import WaitAtOnce
from tests.passes.cases import check as assert_pass
"""


def block(language: str, number: int = 0) -> str:
    """One of the page's blocks of a language, by default the first."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found[number]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the page's pass."""
    assert f"`{FILE}`" in PAGE and f"`{TABLE}`" in PAGE
    root = tmp_path_factory.mktemp("clone")
    for name in ("commfuse_fx", "passes"):
        shutil.copytree(ROOT / name, root / name, symlinks=True)  # with its bytecode, which stays valid
    (root / FILE).write_text(block("python"))
    table = (root / TABLE).read_text()
    added, old, new = (line[1:] for line in block("diff").splitlines())
    assert table.count(old) == 1
    first = table.index("from commfuse_fx.passes")
    (root / TABLE).write_text(f"{table[:first]}{added}\n{table[first:].replace(old, new)}")
    return root


@pytest.fixture(scope="module")
def printed(clone: Path) -> list[str]:
    """What the package prints there, in one process: on the command line, for a compile, and for the page's case."""
    case = block("python", 1)
    assert "from commfuse_fx.testing import assert_pass\n" in case
    case = f"{CHECK}{case.replace('from commfuse_fx.testing import assert_pass', '')}"
    path = os.pathsep.join([str(clone), str(ROOT)])  # the tests are those of this repository
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    script = f'print("{BREAK}")\n'.join([LIST, COMPILE, case, ""])
    made = subprocess.run([sys.executable, "-c", script], cwd=clone, env=environment, capture_output=True, text=True)
    parts = made.stdout.split(f"{BREAK}\n")
    assert made.returncode == 0, f"part {len(parts)} fails: {made.stderr}"
    return parts


def test_the_pass_is_on_the_command_line(printed: list[str]) -> None:
    assert """wait_at_once
  Wait for every collective where it starts.
  stage: schedule
  requires: averaged
  option least: int >= 0 (default: 0)
""" in printed[0]


def test_the_pass_has_its_place_in_a_compile(printed: list[str]) -> None:
    assert "lower_average wait_at_once keep_gradients" in printed[1]


def test_the_case_of_the_page_is_one_of_this_repository(printed: list[str]) -> None:
    """Specs are what ops make, and all ranks compute what they computed before."""
    assert len(printed) == 4
