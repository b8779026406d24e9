"""Type checkers know which form `compile` returns: its overloads, read from the source and checked by mypy.

PyTorch's own types take mypy half a minute; here its classes are stand-ins of one line, and the overloads are those of
commfuse_fx/api.py word for word.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest
from mypy import api as mypy

import commfuse_fx as cf
from commfuse_fx import api
from commfuse_fx.config import option_types
from commfuse_fx.config.context import CONTEXT_NAMES
from commfuse_fx.config.options import DEFAULTS, PARALLEL_MODE_ALIASES, PARALLEL_MODES, SEARCH_MODES
from commfuse_fx.config.parallel_optimizer import ParallelOptimizer

STAND_INS = """
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, overload
from typing_extensions import Unpack
class nn:
    class Module: ...
class torch:
    class optim:
        class Optimizer: ...
LossFn = Callable[..., Any]
class ClusterSpec: ...
class DeviceMesh: ...
class FusionConfig: ...
class ScheduleConfig: ...
class StepProfile: ...
class TrialLimits: ...
class CompiledStep: ...
class CompiledModule: ...
"""

CALLS = """
from __future__ import annotations
from typing_extensions import assert_type
from stand_ins import CompiledModule, CompiledStep, LossFn, compile, nn, torch
def of(model: nn.Module, loss: LossFn, adam: torch.optim.Optimizer, word: str, perhaps: LossFn | None) -> None:
    assert_type(compile(model), CompiledModule)
    assert_type(compile(model, {"allreduce": {}}, find_unused_parameters=True), CompiledModule)
    assert_type(compile(model, comm_fusion=None, form="module"), CompiledModule)
    assert_type(compile(model, form=None), CompiledModule)
    assert_type(compile(model, capture="dynamo", backend="eager"), CompiledModule)
    assert_type(compile(model, loss_fn=loss), CompiledStep)
    assert_type(compile(model, optimizer=adam), CompiledStep)
    assert_type(compile(model, None, loss_fn=loss, optimizer=adam, has_aux=True), CompiledStep)
    assert_type(compile(model, loss_fn=None, optimizer=adam), CompiledStep)
    assert_type(compile(model, form="step"), CompiledStep)
    assert_type(compile(model, loss_fn=loss, form="step"), CompiledStep)
    assert_type(compile(model, form=word), CompiledStep | CompiledModule)
    assert_type(compile(model, loss_fn=perhaps), CompiledStep | CompiledModule)
"""

WRONG = {
    "compile(model, comm_fusoin=None)": 'Unexpected keyword argument "comm_fusoin"',
    'compile("model")': 'No overload variant of "compile" matches',
    'compile(model, parallel_mode="semi")': 'No overload variant of "compile" matches',
    'compile(model, {"allreduce": 3}, accumulate_steps="2")': 'No overload variant of "compile" matches',
    "compile(model, schedule=3)": 'No overload variant of "compile" matches',
    "assert_type(compile(model), CompiledStep)": 'Expression is of type "CompiledModule"',
}


def overloads() -> list[str]:
    """The types of options and the overloads of `compile`, without the function itself."""
    types = ast.parse(Path(str(option_types.__file__)).read_text()).body
    found = [ast.unparse(node) for node in types if isinstance(node, ast.ClassDef | ast.Assign)]
    for node in ast.walk(ast.parse(Path(str(api.__file__)).read_text())):
        if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
            found.append(ast.unparse(node))
    return found


def test_the_public_signatures_say_what_they_take() -> None:
    for function in (cf.compile, cf.set_auto_parallel_context, cf.get_auto_parallel_context):
        assert not re.search(r"\bAny\b", str(inspect.signature(function)))
    of_context = typing.get_type_hints(option_types.ContextSettings)
    assert tuple(sorted(of_context)) == tuple(sorted(CONTEXT_NAMES))
    assert [*typing.get_type_hints(option_types.Options)] == [name for name in DEFAULTS if name != "comm_fusion"]
    asked = [getattr(option_types, name) for name in ("ParallelMode", "SearchMode")]
    assert [set(typing.get_args(each)) for each in asked] == [
        {*PARALLEL_MODES, *PARALLEL_MODE_ALIASES},
        {*SEARCH_MODES},
    ]
    sharing = typing.get_type_hints(option_types.ParallelOptimizerOptions)
    assert [*sharing] == [field.name for field in dataclasses.fields(ParallelOptimizer)]


def test_the_form_follows_from_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum("def compile" in each for each in overloads()) == 5
    (tmp_path / "stand_ins.pyi").write_text("\n".join([STAND_INS, *overloads()]))
    (tmp_path / "program.py").write_text(CALLS + "".join(f"    {call}\n" for call in WRONG))
    monkeypatch.chdir(tmp_path)
    found, failed, _ = mypy.run(["--strict", "--no-site-packages", "--config-file=", "--cache-dir=cache", "program.py"])
    assert not failed
    first = CALLS.count("\n") + 1
    said: dict[int, str] = {}
    for place, text in re.findall(r"^program\.py:(\d+): (?:error|note): (.*)$", found, re.MULTILINE):
        said[int(place) - first] = said.get(int(place) - first, "") + text
    assert sorted(said) == [*range(len(WRONG))], found
    assert [text for number, text in enumerate(WRONG.values()) if text not in said[number]] == []
