"""The distribution: what pyproject.toml lists, what a build contains, and how the package is imported.

The files of ``commfuse_fx.passes`` live in ``passes/`` at the top level and are reached through a link,
``commfuse_fx/passes``; every test here guards one way in which that could come apart.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / "commfuse_fx" / "passes"
PLUGIN = "pytest_commfuse.py"
BARE = re.compile(r"(?:\bimport|\bfrom|,)[\s\\]*passes\b")
"""Every import of `passes` contains this, and few other texts do: parsing all files takes seconds."""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run ``command`` with no PYTHONPATH but the one given; return its output, or fail with all of it."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    env |= environment
    pipe, merge = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=pipe, stderr=merge, check=False)
    assert done.returncode == 0, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}"
    return done.stdout


def source_files() -> set[str]:
    """Python files of the package as an installation has them: ``commfuse_fx/passes/...``."""
    found = set()
    for folder, subfolders, names in os.walk(ROOT / "commfuse_fx", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        found |= {Path(folder, name).relative_to(ROOT).as_posix() for name in names if name.endswith(".py")}
    return found


def repository_files() -> list[Path]:
    """Python files that git tracks or would add; all of them where git cannot tell."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py")
    paths = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith(".")]
    if shutil.which("git") and (ROOT / ".git").exists():
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        if done.returncode == 0:
            paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return sorted({path for path in paths if path.is_file()})


def import_from(cwd: Path, **environment: str) -> list[Path]:
    """Import the package in a new process started in ``cwd``; return where its two parts came from."""
    script = "import commfuse_fx, commfuse_fx.passes as p; print(commfuse_fx.__file__); print(p.__file__)"
    lines = run(sys.executable, "-W", "ignore", "-c", script, cwd=cwd, **environment).splitlines()
    return [Path(line) for line in lines[-2:]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the repository."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("commfuse_fx", "passes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", PLUGIN):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == source_files() | {PLUGIN}
    assert "commfuse_fx/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    expected = source_files() | {"commfuse_fx/py.typed", "pyproject.toml", "LICENSE", PLUGIN}
    assert expected <= set(members)
    assert [name for name in expected if not members[name].isreg()] == []


def test_another_torch_gets_an_environment_with_a_setuptools_of_its_own(tmp_path: Path) -> None:
    """PyTorch 2.11 and 2.12 refuse the release of setuptools that constraints.txt names."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    named = {}
    for version in (None, "2.12.0"):
        venv = ".venv" if version is None else f".venv-torch-{version}"
        (tmp_path / venv / "bin").mkdir(parents=True)
        python = tmp_path / venv / "bin" / "python"
        python.write_text("#!/bin/sh\n")  # installs nothing
        python.chmod(0o755)
        setting = () if version is None else (f"TORCH={version}",)
        run("make", f"{venv}/.installed", *setting, cwd=tmp_path)
        named[version] = (tmp_path / venv / "constraints.txt").read_text().splitlines()
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert named[None] == pinned
    kept = [line for line in pinned if not line.startswith("setuptools==")]
    assert named["2.12.0"] == ["torch==2.12.0" if line.startswith("torch==") else line for line in kept]


def test_the_readme_names_the_pytorch_that_pip_takes() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        (pin,) = [each for each in tomllib.load(file)["project"]["dependencies"] if each.startswith("torch")]
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"PyTorch 2\.(\d+) to 2\.(\d+)", readme)
    assert found is not None
    first, last = map(int, found.groups())
    assert pin == f"torch>=2.{first},<2.{last + 1}"
    status = (ROOT / "docs" / "status.md").read_text()
    assert f"PyTorch 2.{first} to 2.{last}" in status
    tried = {int(minor) for minor in re.findall(r"^\| 2\.(\d+)\.\d+ \|", status, re.MULTILINE)}
    assert tried | {13} == set(range(first, last + 1)), "each is tried, and listed in docs/status.md"


def test_package_list_matches_the_tree() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    in_tree = {name.rpartition("/")[0].replace("/", ".") for name in source_files()}
    assert sorted(listed) == sorted(in_tree), "bring [tool.setuptools] packages in pyproject.toml up to date"


def test_every_package_has_an_init() -> None:
    files = source_files()
    folders = {name.rpartition("/")[0] for name in files}
    assert sorted(folder for folder in folders if f"{folder}/__init__.py" not in files) == []


def test_passes_is_a_relative_link() -> None:
    assert LINK.is_symlink(), "commfuse_fx/passes must be a link (on Windows: git config core.symlinks true)"
    assert os.readlink(LINK) == "../passes"
    assert not (ROOT / "passes").is_symlink()
    assert (ROOT / "passes" / "__init__.py").is_file()


def test_sdist_and_the_wheel_made_from_it(checkout: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", str(checkout), cwd=tmp_path)
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    (wheel,) = (checkout / "dist").glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)


def test_wheel_made_from_the_checkout_imports_when_installed(checkout: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", str(checkout), cwd=tmp_path)
    (wheel,) = (checkout / "dist").glob("*.whl")
    check_wheel(wheel)

    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", str(site), str(wheel), cwd=tmp_path)
    assert not (site / "commfuse_fx" / "passes").is_symlink()
    assert not (site / "passes").exists()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    package, passes = import_from(elsewhere, PYTHONPATH=str(site))
    assert package == site / "commfuse_fx" / "__init__.py"
    assert passes == site / "commfuse_fx" / "passes" / "__init__.py"
    # Named as well, the plugin is one and the same.
    for options in ((), ("-p", "pytest_commfuse")):
        assert "--graph-update" in run(
            sys.executable, "-m", "pytest", *options, "--help", cwd=elsewhere, PYTHONPATH=str(site)
        )


def test_bare_checkout_imports() -> None:
    package, passes = import_from(ROOT)
    assert package == ROOT / "commfuse_fx" / "__init__.py"
    assert passes == LINK / "__init__.py"


def test_nothing_imports_bare_passes() -> None:
    offenders = []
    for path in repository_files():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text, filename=str(path))) if BARE.search(text) else ():
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            if any(name.split(".")[0] == "passes" for name in names):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == [], "import commfuse_fx.passes instead"
