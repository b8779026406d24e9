"""The rules of the package: which room may import which, no circles, one name for one thing, small files."""

from __future__ import annotations

import ast
import collections
from functools import cache
from pathlib import Path
from statistics import median

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PASSES = ROOT / "commfuse_fx", ROOT / "passes"

ORDER = (
    ("errors",),
    ("support",),
    ("machine",),
    ("config",),
    ("ir",),
    ("kernels", "ops", "cost", "runtime"),
    ("simulate",),
    ("solvers", "measure"),
    ("sharding",),
    ("capture", "passes"),
    ("planning",),
    ("inspect",),
    ("gradients",),
    ("votes",),
    ("trials",),
    ("calls",),
    ("checkpoints", "dynamo"),
    ("frontends",),
    ("api", "virtual"),
    ("__init__",),
    ("testing",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""Rooms and files at the root, from the bottom up. A room imports itself and what stands below it."""

BELOW_RUNTIME = {"errors", "support", "machine", "config", "ir", "kernels"}
ABOVE_MEASURE = {"trials", "frontends", "__init__", "commands"}
OF_A_CALL = {"gradients", "votes", "calls", "checkpoints", "dynamo"}
ABOVE_RUNTIME = {"measure", "api", "virtual", "testing"} | OF_A_CALL | ABOVE_MEASURE
LARGER = {
    "Planner": 33,
    "Executor": 31,
    "ModuleSession": 31,
    "Session": 31,
    "Replan": 29,
    "DividedParameter": 27,
    "CompiledModule": 27,
    "Shards": 24,
    "Engine": 21,
    "Division": 21,
    "Reads": 21,
}
"""Classes of more than 20 methods, with their numbers, which may only shrink."""

COMPOSITES = {"commfuse_fx/passes/schedule/schedule.py"}
"""Passes that consist of others."""

Import = tuple[str, str, bool]
"""(file, imported file, whether the import stands inside a function), as paths of an installation."""


@cache
def files() -> dict[str, Path]:
    found = {f"commfuse_fx/{path.relative_to(PACKAGE).as_posix()}": path for path in PACKAGE.rglob("*.py")}
    found |= {f"commfuse_fx/passes/{path.relative_to(PASSES).as_posix()}": path for path in PASSES.rglob("*.py")}
    return dict(sorted(found.items()))


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in files().items()}


def module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports() -> list[Import]:
    """Of this package, including those for type checkers and inside functions."""
    by_module = {module(name): name for name in files()}
    found: list[Import] = []
    for name, tree in trees().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commfuse_fx"):
                targets = [by_module.get(f"{node.module}.{each.name}", by_module[node.module]) for each in node.names]
            elif isinstance(node, ast.Import):
                targets = [by_module[each.name] for each in node.names if each.name.startswith("commfuse_fx")]
            else:
                continue
            found += [(name, target, id(node) in inside) for target in targets if target != name]
    return found


def room(name: str) -> str:
    return name.split("/")[1].removesuffix(".py")


def may_import(upper: str, lower: str) -> bool:
    level = {each: number for number, rooms in enumerate(ORDER) for each in rooms}
    if upper == "runtime":
        return lower in BELOW_RUNTIME
    if lower == "runtime":
        return upper in ABOVE_RUNTIME
    if lower == "measure":
        return upper in ABOVE_MEASURE
    return level[lower] < level[upper]


def test_imports_run_downwards() -> None:
    pairs = [(one, other) for one, other, _ in imports() if room(one) != room(other)]
    assert [pair for pair in pairs if not may_import(*map(room, pair))] == []


def test_there_are_no_circles() -> None:
    graph = nx.DiGraph((one, other) for one, other, _ in imports())
    assert [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1] == []


def folder(name: str) -> str:
    return name.rpartition("/")[0]


def test_folders_of_a_room_form_no_circle() -> None:
    inside = [(one, other) for one, other, _ in imports() if room(one) == room(other)]
    pairs = [(one, other) for one, other in inside if "__init__.py" not in one + other]
    graph = nx.DiGraph((folder(one), folder(other)) for one, other in pairs if folder(one) != folder(other))
    assert [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1] == []


def test_a_folder_has_at_most_20_files() -> None:
    count = collections.Counter(folder(name) for name in files() if not name.endswith("/__init__.py"))
    assert {name: number for name, number in count.items() if number > 20} == {}


def test_a_class_has_at_most_20_methods() -> None:
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    count = {each.name: sum(isinstance(part, functions) for part in each.body) for each in classes}
    assert {name: number for name, number in count.items() if number > 20} == LARGER


def test_no_import_hides_inside_of_a_function() -> None:
    assert [(one, other) for one, other, is_inside in imports() if is_inside] == []


def test_a_pass_imports_no_other_pass() -> None:
    declared = ("commfuse_fx/passes/__init__.py", "commfuse_fx/passes/declaration.py")
    passes = [(one, other) for one, other, _ in imports() if "/passes/" in one and "/passes/" in other]
    pairs = [(one, other) for one, other in passes if one not in declared and other not in declared]
    assert [pair for pair in pairs if pair[0] not in COMPOSITES] == []


def repeated(names: list[str]) -> list[str]:
    return [name for name, count in collections.Counter(names).items() if count > 1]


def test_a_file_name_is_used_once() -> None:
    assert repeated([path.name for path in files().values() if path.name != "__init__.py"]) == []


def test_a_class_name_is_used_once() -> None:
    classes = [node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert repeated([name for name in classes if not name.startswith("_")]) == []


@pytest.mark.parametrize(("most", "of"), [(400, max), (130, median)], ids=["longest", "median"])
def test_files_are_small(most: int, of: object) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in files().items() if path.name != "__init__.py"}
    assert callable(of) and of(lines.values()) <= most, {name: n for name, n in lines.items() if n > 400}


def test_few_files_stand_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_every_room_says_what_it_is() -> None:
    rooms = [
        tree for name, tree in trees().items() if name.endswith("/__init__.py") and name != "commfuse_fx/__init__.py"
    ]
    assert all(ast.get_docstring(tree) for tree in rooms)
