"""Targets: a function of the user's that makes what `compile` takes, named as `package.module:factory`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from commfuse_fx.commands.console import text_of
from commfuse_fx.errors import CommFuseError, ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import show

KEYS = ("model", "loss_fn", "optimizer", "inputs")
NEEDED = ("model", "inputs")

_RETURN = (
    "return (model, loss_fn, optimizer, inputs), or (model, inputs) for the module form, or a dict with these keys. "
    "loss_fn and optimizer may be None. inputs are a tensor, a tuple of arguments (with loss_fn the last one is the "
    "target) or a dict of keyword arguments"
)
_GIVE = "give package.module:factory or path/to/file.py:factory"


class TargetError(CommFuseError, RuntimeError):
    """The code of a target has raised."""


@dataclass(frozen=True)
class Target:
    """What a factory returned. args, kwargs: those of a call of the step."""

    model: nn.Module
    loss_fn: Any
    optimizer: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def load_target(text: str) -> Target:
    """Import the module of `package.module:factory` (the current folder is on the path) or run the file of
    `path/to/file.py:factory`, and call the factory. What that code prints goes to stderr.

    Raises ConfigValueError or ConfigTypeError for a target that is not there or returns something else, TargetError
    where its code raises.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ConfigValueError(f"{text!r} is no target: {_GIVE}")
    with redirect_stdout(sys.stderr):
        module = _module(place)
        made = _guarded(_factory(module, place, name), f"{text}", getattr(module, "__file__", None) or "")
    return as_target(made, text)


def as_target(made: Any, where: str) -> Target:
    """What a factory returned, checked. Raises ConfigTypeError, ConfigKeyError or ConfigValueError, naming `where`."""
    if isinstance(made, dict):
        parts = _parts_of_dict(made, where)
    elif isinstance(made, tuple):
        if len(made) not in (len(KEYS), len(NEEDED)):
            raise ConfigValueError(f"{where} returned a tuple of {len(made)}; {_RETURN}")
        parts = dict(zip(KEYS if len(made) == len(KEYS) else NEEDED, made, strict=True))
    else:
        raise ConfigTypeError(f"{where} returned {_kind(made)}; {_RETURN}")
    model, inputs = parts["model"], parts["inputs"]
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"{where} returned {_kind(model)} as model, not a torch.nn.Module; {_RETURN}")
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    elif isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        kwargs = dict(inputs)
    else:
        raise ConfigTypeError(f"{where} returned {_kind(inputs)} as inputs; {_RETURN}")
    return Target(model, parts.get("loss_fn"), parts.get("optimizer"), args, kwargs)


def _parts_of_dict(made: dict[Any, Any], where: str) -> dict[Any, Any]:
    unknown = [key for key in made if key not in KEYS]
    if unknown:
        raise ConfigKeyError(f"{where} returned a dict with the key {show(unknown[0])}; {_RETURN}")
    missing = [key for key in NEEDED if key not in made]
    if missing:
        raise ConfigKeyError(f"{where} returned a dict without {missing[0]!r}; {_RETURN}")
    return made


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _module(place: str) -> ModuleType:
    return _module_of_file(Path(place)) if place.endswith(".py") or "/" in place else _module_of_name(place)


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigValueError(f"there is no file {str(path)!r}; {_GIVE}")
    name = f"commfuse_target_{path.stem}"  # which no other module has
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigValueError(f"{str(path)!r} is not a file of Python code: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    _add_to_path(path.resolve().parent)  # as for a file that is run, so that it finds its neighbours
    sys.modules[name] = module  # where dataclasses and others look their own module up
    load = spec.loader.exec_module
    _guarded(lambda: load(module), str(path), str(path.resolve()))
    return module


def _module_of_name(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigValueError(
                f"there is no module {error.name!r}, in the current folder or installed; {_GIVE}"
            ) from error
        raise TargetError(_message(error, f"importing {name}", "")) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, (TypeError, ValueError)) and not all(part.isidentifier() for part in name.split(".")):
            raise ConfigValueError(f"{name!r} is not the name of a module; {_GIVE}") from error
        raise TargetError(_message(error, f"importing {name}", "")) from error


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _factory(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if found is None:
        own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        near = difflib.get_close_matches(name, own, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigValueError(f"{place} has no function {name!r}{hint}")
    if not callable(found):
        raise ConfigTypeError(f"{place}:{name} is {_kind(found)}; give a function without arguments")
    factory: Callable[[], Any] = found
    return factory


def _guarded(call: Callable[[], Any], what: str, file: str) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(_message(error, what, file)) from error


def _message(error: BaseException, what: str, file: str) -> str:
    """What was raised, and the innermost line of the target's own file, or of any file where none of that is known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if frame.filename == file]
    outside = [frame for frame in frames if frame.filename != __file__]
    found = own or outside
    where = f" at {Path(found[-1].filename).name}, line {found[-1].lineno}" if found else ""
    first = next((line for line in text_of(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename is not None:
        where = f" at {Path(error.filename).name}, line {error.lineno}"
        first = error.msg
    return f"{what} raised {type(error).__name__}{where}{': ' if first else ''}{first}"
