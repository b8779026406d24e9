"""Targets: where a factory is found, what it may return, and what is said when its code is at fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commfuse_fx.cli import main
from commfuse_fx.commands.targets import TargetError, as_target, load_target
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError

GOOD = """
import torch
from neighbour import SIZE

def make():
    print("noise")
    model = torch.nn.Linear(SIZE, 2)
    return model, torch.nn.functional.mse_loss, None, (torch.ones(3, SIZE), torch.ones(3, 2))

def make_more():
    return data()

def data():
    raise ValueError("no data\\nmore")

def leaves():
    raise SystemExit("usage: ...")

class Odd(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def odd():
    raise Odd("told")

def ends():
    raise GeneratorExit("gone")

def mute():
    raise Mute()

class Raises(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.error = error

    def forward(self, x):
        raise self.error

def raises(error):
    return lambda: (Raises(error), torch.ones(4))

odd_forward, mute_forward, exits = raises(Odd("forward")), raises(Mute()), raises(SystemExit(0))

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that are targets; the current one."""
    (tmp_path / "good_target.py").write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("SIZE = 4\n")
    (tmp_path / "wrong_target.py").write_text("x = 1\ny = x +\n")
    (tmp_path / "broken_target.py").write_text("import torch\n\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("good_target", "neighbour", "wrong_target", "broken_target"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("place", ["good_target", "good_target.py", "./good_target.py"])
def test_a_module_and_a_file(folder: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(f"{place}:make")
    assert isinstance(target.model, nn.Linear) and target.optimizer is None
    assert target.loss_fn is nn.functional.mse_loss
    assert [tuple(each.shape) for each in target.args] == [(3, 4), (3, 2)] and target.kwargs == {}
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "noise\n")


def test_a_file_in_another_folder_finds_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_target(f"{folder}/good_target.py:make").args[0].shape == (3, 4)


def test_a_file_does_not_take_the_place_of_a_module(folder: Path) -> None:
    import json

    (folder / "json.py").write_text(GOOD)
    load_target("json.py:make")
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    "text, message",
    [
        ("good_target", "'good_target' is no target: give package.module:factory or path/to/file.py:factory"),
        (":make", "is no target"),
        ("good_target:", "is no target"),
        ("no_such.thing:make", "there is no module 'no_such', in the current folder or installed"),
        ("torch.no_such:make", "there is no module 'torch.no_such'"),
        ("a b:make", "there is no module 'a b'"),
        (".make:make", "'.make' is not the name of a module"),
        ("..:make", "'..' is not the name of a module"),
        ("no_such.py:make", "there is no file 'no_such.py'"),
        ("good_target.py:mak", r"good_target.py has no function 'mak'; did you mean make"),
        ("good_target:xyz", "good_target has no function 'xyz'$"),
        ("good_target:number", "good_target:number is an object of type int; give a function without arguments"),
    ],
)
def test_targets_that_are_not_there(folder: Path, text: str, message: str) -> None:
    with pytest.raises((ConfigValueError, ConfigTypeError), match=message):
        load_target(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("good_target:make_more", "good_target:make_more raised ValueError at good_target.py, line 14: no data$"),
        ("good_target.py:make_more", "raised ValueError at good_target.py, line 14: no data$"),
        ("good_target:leaves", "raised SystemExit at good_target.py, line 17: usage: ..."),
        ("good_target:odd", "raised Odd at good_target.py, line .*: told$"),
        ("good_target:ends", "raised GeneratorExit at good_target.py, line .*: gone$"),
        ("good_target:mute", "raised Mute at good_target.py, line .*[0-9]$"),
        ("wrong_target:make", "importing wrong_target raised SyntaxError at wrong_target.py, line 2: invalid syntax"),
        ("wrong_target.py:make", "wrong_target.py raised SyntaxError at wrong_target.py, line 2: invalid syntax"),
        ("broken_target:make", "raised ModuleNotFoundError at broken_target.py, line 3: No module named 'no_such_pack"),
        ("broken_target.py:make", "raised ModuleNotFoundError at broken_target.py, line 3: No module named 'no_such_"),
    ],
)
def test_code_that_raises_is_named_with_its_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        load_target(text)
    assert caught.value.__cause__ is not None, "for --traceback"


MODEL = nn.Linear(2, 2)


def test_what_a_factory_may_return() -> None:
    x = torch.ones(2, 2)
    for inputs, args, kwargs in ((x, (x,), {}), ([x, x], (x, x), {}), ((), (), {}), ({"input": x}, (), {"input": x})):
        for made in ((MODEL, None, None, inputs), (MODEL, inputs), {"model": MODEL, "inputs": inputs}):
            target = as_target(made, "m:f")
            assert (target.args, target.kwargs, target.loss_fn, target.optimizer) == (args, kwargs, None, None)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: None, ConfigTypeError, "m:f returned None; return"),
        (lambda: MODEL, ConfigTypeError, "m:f returned an object of type Linear; return .model, loss_fn, optimizer"),
        (lambda: (MODEL, None), ConfigTypeError, "m:f returned None as inputs; return"),
        (lambda: (torch.ones(2), MODEL), ConfigTypeError, "m:f returned an object of type Tensor as model, not a"),
        (lambda: (MODEL, None, ()), ConfigValueError, r"a tuple of 3; return .*, or \(model, inputs\) for the module"),
        (lambda: (None, None, None, ()), ConfigTypeError, "m:f returned None as model, not a torch.nn.Module"),
        (lambda: (MODEL, None, None, 3), ConfigTypeError, "m:f returned an object of type int as inputs"),
        (lambda: (MODEL, None, None, {1: 2}), ConfigTypeError, "m:f returned an object of type dict as inputs"),
        (lambda: {"model": MODEL}, ConfigKeyError, "m:f returned a dict without 'inputs'"),
        (lambda: {"model": MODEL, "input": ()}, ConfigKeyError, "m:f returned a dict with the key 'input'; return"),
    ],
)
def test_what_a_factory_may_not_return(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_target(make(), "m:f")


@pytest.mark.parametrize(
    "name, said", [("odd_forward", "Odd: forward"), ("mute_forward", "Mute"), ("exits", "SystemExit: 0")]
)
def test_what_a_model_raises_ends_a_command_as_failed(
    folder: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lower", f"good_target.py:{name}"]) == 1
    err = capsys.readouterr().err
    assert said in err and "--traceback" in err and "Traceback" not in err
