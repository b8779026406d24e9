"""Errors that leave a public function show the user's frames, not those of this project and of torch's tracing.

With COMMFUSE_TRACEBACK=full all frames stay. The errors themselves, their causes and their notes are never changed.
Frames go where an error leaves, as a hook of `sys.excepthook` would miss what torchrun, loggers and notebooks print.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from commfuse_fx.errors import CommFuseError

VARIABLE = "COMMFUSE_TRACEBACK"
FULL = "full"

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_CAPTURE = os.path.join(_HERE, "capture") + os.sep
_GENERATED = "<commfuse"
_TORCH = os.path.dirname(torch.__file__) + os.sep

# What a trace goes through between two lines of the user, relative to torch's folder.
_TRACING = tuple(
    _TORCH + name.replace("/", os.sep)
    for name in (
        "__init__.py",
        "_compile.py",
        "_decomp/",
        "_dispatch/",
        "_dynamo/",
        "_functorch/",
        "_guards.py",
        "_higher_order_ops/",
        "_jit_internal.py",
        "_library/",
        "_logging/",
        "_meta_registrations.py",
        "_ops.py",
        "_prims",
        "_refs/",
        "_subclasses/",
        "_tensor.py",
        "_utils_internal.py",
        "autograd/",
        "func/",
        "fx/",
        "library.py",
        "nn/modules/container.py",
        "nn/modules/module.py",
        "overrides.py",
        "utils/_contextlib.py",
        "utils/_python_dispatch.py",
        "utils/_pytree.py",
        "utils/_stats.py",
    )
)
_OVERRIDES = os.path.join(_TORCH, "overrides.py")

# Code that only passes a call on: left out where it passes on one of those that are left out.
_RELAYS = ("<string>", "<eval_with_key>", "functools.py", "contextlib.py", "mock.py")


def are_full() -> bool:
    """Whether COMMFUSE_TRACEBACK=full asks for all frames."""
    return os.environ.get(VARIABLE) == FULL


def user_frames_only(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """For public functions: what leaves them is shortened."""

    @functools.wraps(function)
    def boundary(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            if sys.version_info < (3, 11):  # a bare raise brings the old traceback back
                raise error.with_traceback(error.__traceback__)  # noqa: B904
            raise

    return boundary


def shorten(error: BaseException) -> None:
    """Leave frames out of the tracebacks of an error and of all errors that it comes from, in place.

    An error of this project's own code that nobody raised on purpose keeps its frames: it is a fault to report.
    """
    if are_full() or _is_fault(error):
        return
    for each in _connected(error):
        each.__traceback__ = _shortened(each.__traceback__)


def _connected(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of groups, each once."""
    seen: dict[int, None] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen[id(each)] = None
        yield each
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _is_left_out(file: str) -> bool:
    return file.startswith((_HERE, _GENERATED, *_TRACING))


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, CommFuseError) or not isinstance(error, Exception):
        return False
    files = [_file(entry) for entry in _frames(error.__traceback__)]
    raised_here = bool(files) and files[-1].startswith(_HERE) and not files[-1].startswith(_CAPTURE)
    return raised_here and all(_is_left_out(file) or file.endswith(_RELAYS) for file in files)


def _shortened(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    hidden = False  # the frame before
    for entry in _frames(traceback):
        file = _file(entry)
        hidden = _is_left_out(file) or (hidden and file.endswith(_RELAYS))
        goes_round = entry.tb_next is not None and _file(entry.tb_next) == _OVERRIDES and file.startswith(_TORCH)
        if not hidden and not goes_round:  # a torch function that hands its call to a mode is called once more
            kept.append(entry)
    shortened: TracebackType | None = None
    for entry in reversed(kept):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened
