"""Type checkers know which form `compile` returns: its overloads, read from the source and checked by mypy.

PyTorch's own types take mypy half a minute; here its classes are stand-ins of one line, and the overloads are those of
commfuse_fx/api.py word for word.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mypy import api as mypy

from commfuse_fx import api

STAND_INS = """
from collections.abc import Callable
from typing import Any, Literal, TypedDict, overload
from typing_extensions import Unpack
class nn:
    class Module: ...
class torch:
    class optim:
        class Optimizer: ...
LossFn = Callable[..., Any]
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
    "assert_type(compile(model), CompiledStep)": 'Expression is of type "CompiledModule"',
}


def overloads() -> list[str]:
    """The table of options and the overloads of `compile`, without the function itself."""
    found = []
    for node in ast.walk(ast.parse(Path(str(api.__file__)).read_text())):
        options = isinstance(node, ast.ClassDef) and node.name == "Options"
        overload = isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list)
        if options or overload:
            found.append(ast.unparse(node))
    return found


def test_the_form_follows_from_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(overloads()) == 6, "the options and five overloads"
    (tmp_path / "stand_ins.pyi").write_text("\n".join([STAND_INS, *overloads()]))
    (tmp_path / "program.py").write_text(CALLS + "".join(f"    {call}\n" for call in WRONG))
    monkeypatch.chdir(tmp_path)
    found, failed, _ = mypy.run(["--strict", "--no-site-packages", "--config-file=", "--cache-dir=cache", "program.py"])
    assert not failed
    errors = [line for line in found.splitlines() if ": error: " in line]
    # The misspelt option is told twice: by its name, and by the overload that then does not match.
    wrong = {next((call for call, said in WRONG.items() if said in line), line) for line in errors}
    assert wrong == set(WRONG) and len(errors) == 4
