"""The public interface is that of public_interface.txt, type checkers see the same names, docs use no others.

A line of public_interface.txt that changes or goes breaks somebody's program: CHANGELOG.md has to say so.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
import pytest_commfuse
from commfuse_fx import cli

ROOT = Path(__file__).resolve().parent.parent
FROZEN = Path(__file__).with_name("public_interface.txt")

MODULES = (
    "commfuse_fx",
    "commfuse_fx.ops",
    "commfuse_fx.plans",
    "commfuse_fx.testing",
    "commfuse_fx.cli",
    "commfuse_fx.sharding",
    "commfuse_fx.ir",
    "commfuse_fx.cost",
    "commfuse_fx.simulate",
    "commfuse_fx.passes",
    "commfuse_fx.planning",
)
"""What a program may import from; `ops` and `plans` as attributes of the package. The last five are for passes, and
`sharding` is for the rules of `register_rule`."""


def public(module: str) -> dict[str, Any]:
    """Name -> object of what a module offers: its `__all__`, or else the functions and classes that it defines."""
    found = (
        getattr(cf, module.removeprefix("commfuse_fx.")) if module in MODULES[1:3] else importlib.import_module(module)
    )
    here = {name: value for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__}
    names = getattr(found, "__all__", None) or [name for name in here if not name.startswith("_")]
    return {name: getattr(found, name) for name in sorted(names)}


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """(name, function) of the methods and properties that a class and its bases in this package define."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("commfuse_fx") else ():
            value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            if isinstance(value, types.FunctionType) and (name == "__call__" or not name.startswith("_")):
                yield name, inspect.unwrap(value)


def signature(function: Any) -> str:
    """Names and defaults, without annotations."""
    found = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def python_lines() -> Iterator[str]:
    for module in MODULES:
        for name, value in public(module).items():
            shown = signature(value) if isinstance(value, types.FunctionType) and module != "commfuse_fx.cli" else ""
            yield f"{module}.{name}{shown}"
    for cls in (value for value in public("commfuse_fx").values() if isinstance(value, type)):
        yield from sorted({f"{cls.__name__}.{name}" for name in (*dict(members(cls)), *fields(cls))})


def fields(cls: type) -> list[str]:
    return (
        [each.name for each in dataclasses.fields(cls) if each.name[0] != "_"] if dataclasses.is_dataclass(cls) else []
    )


def command_lines() -> Iterator[str]:
    def shown(parser: argparse.ArgumentParser) -> str:
        options = (option for action in parser._actions for option in action.option_strings)
        words = (action.dest.upper() for action in parser._actions if not action.option_strings)
        return " ".join([*(word for word in words if word != "==SUPPRESS=="), *sorted({*options} - {"-h"})])

    parser = cli._parser()
    yield f"commfuse {shown(parser)}"
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for command in commands.choices.values():
        command.load()
    yield from (f"commfuse {name} {shown(command)}" for name, command in sorted(commands.choices.items()))


class PluginOptions:
    """Stands for pytest's parser, and keeps what a plugin adds."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def getgroup(self, *_: str) -> PluginOptions:
        return self

    def addoption(self, name: str, **_: object) -> None:
        self.found.append(f"pytest option {name}")

    def addini(self, name: str, *_: str, **__: object) -> None:
        self.found.append(f"pytest ini {name}")


def plugin_lines() -> list[str]:
    options = PluginOptions()
    pytest_commfuse.pytest_addoption(options)  # type: ignore[arg-type]
    return [*options.found, "pytest fixture graph_snapshot"]


def environment_lines() -> list[str]:
    sources = [ROOT / "pytest_commfuse.py", *(ROOT / "commfuse_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    found = {name for path in sources for name in re.findall(r"\bCOMMFUSE_[A-Z]+\b", path.read_text())}
    return [f"environment {name}" for name in sorted(found)]


def format_lines(folder: Path) -> Iterator[str]:
    lowered = cf.compile(nn.Linear(2, 2), loss_fn=nn.functional.mse_loss, device_num=2).lower(*torch.zeros(2, 2, 2))
    dump = lowered.dump(folder)
    cluster = cf.resolve_cluster("gloo-1gbit")
    profile = cf.StepProfile(cluster=cluster, world=2, model="0" * 64, node_seconds={"a": 1e-3})
    for file in ("index.json", "captured.json", "graph.json"):
        yield f"schema of {file}: {json.loads((dump / file).read_text())['schema']}"
    yield f"schema of the text: {lowered.text().splitlines()[0]}"
    yield f"schema of a cluster: {json.loads(cluster.to_json())['schema']}"
    yield f"schema of a profile: {json.loads(profile.to_json())['schema']}"
    yield f"schema of a diff: {json.loads(cf.diff(lowered, lowered).to_json())['schema']}"


def test_the_interface_is_the_frozen_one(tmp_path: Path) -> None:
    found = [
        *python_lines(),
        *command_lines(),
        *plugin_lines(),
        *environment_lines(),
        *format_lines(tmp_path),
    ]
    assert found == FROZEN.read_text().splitlines()


def test_type_checkers_see_the_names_where_they_are_imported_from() -> None:
    tree = ast.parse((ROOT / "commfuse_fx" / "__init__.py").read_text())
    (branch, _) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [(node.module, each.name) for node in branch.body if isinstance(node, ast.ImportFrom) for each in node.names]
    homes = [(module, name) for module, names in cf._HOMES.items() for name in names]
    homes += [tuple(path.rsplit(".", 1)) for path in cf._MODULES.values()]
    assert sorted(seen) == sorted(homes)


def test_what_public_functions_return_is_public() -> None:
    known = {value for module in MODULES for value in public(module).values() if isinstance(value, type)}

    def classes(hint: Any) -> Iterator[type]:
        if isinstance(hint, type) and hint.__module__.startswith("commfuse_fx"):
            yield hint
        for part in (*typing.get_args(hint), *(hint if isinstance(hint, list) else ())):
            yield from classes(part)

    names = public("commfuse_fx")
    functions = {name: value for name, value in names.items() if isinstance(value, types.FunctionType)}
    for cls in (value for value in names.values() if isinstance(value, type)):
        functions |= {f"{cls.__name__}.{name}": method for name, method in members(cls)}
    for name, function in functions.items():
        returned = typing.get_type_hints(inspect.unwrap(function)).get("return")
        assert {*classes(returned)} <= known, f"{name} returns what has no public name"


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {*re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    found = [(module, name, value) for module in MODULES for name, value in public(module).items()]
    names = {f"{module}.{name}" for module, name, value in found if not inspect.ismodule(value)}
    assert shown == names


def documented() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        for name, value in public(module).items():
            if isinstance(value, (type, types.FunctionType)):
                yield f"{module}.{name}", value
            if isinstance(value, type):
                yield from ((f"{module}.{name}.{member}", function) for member, function in members(value))


def test_public_names_have_docstrings() -> None:
    assert [name for name, value in documented() if not inspect.getdoc(value)] == []


def test_docstrings_have_a_line_for_each_parameter_or_field() -> None:
    """The reference makes a list of them."""
    crowded = []
    for name, value in documented():
        known = {*(fields(value) if isinstance(value, type) else inspect.signature(value).parameters)}
        inside = re.findall(r"[.;] `?(\w+)`?: ", inspect.getdoc(value) or "")
        crowded += [(name, each) for each in inside if each in known]
    assert crowded == []


def test_importing_the_package_imports_neither_torch_nor_networkx() -> None:
    script = "import sys, commfuse_fx; print([name for name in ('torch', 'networkx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="commfuse_fx.*has no attribute 'compil'"):
        _ = cf.compil
    assert {*cf.__all__} <= {*dir(cf)}


IMPORT = re.compile(
    r"^\s*(?:from (commfuse_fx[\w.]*) import (.+?)|import (commfuse_fx[\w.]*)(?: as \w+)?)\s*(?:#.*)?$", re.MULTILINE
)


def shown_code() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("path", shown_code(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docs_and_examples_use_public_names(path: Path) -> None:
    text = path.read_text()
    code = (
        text
        if path.suffix == ".py"
        else "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    )
    for module, names, whole in IMPORT.findall(code):
        assert (module or whole) in MODULES, f"{module or whole} is not public"
        for name in names.split(", ") if names else ():
            assert name in public(module), f"{module}.{name} is not public"
    if "import commfuse_fx as cf" in code or path.suffix == ".md":
        used = {*re.findall(r"\bcf\.(\w+)", code)}
        assert used <= {*cf.__all__}, f"{sorted(used - {*cf.__all__})} of cf are not public"
