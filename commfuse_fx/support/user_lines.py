"""Which files hold the user's code: not torch's, not ours, and not those of decorators that wrap functions of torch."""

from __future__ import annotations

import contextlib
import functools
import os
from types import FrameType, TracebackType

import torch
import typing_extensions

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DECORATORS = (contextlib.__file__, functools.__file__, typing_extensions.__file__)


def is_library(filename: str) -> bool:
    """Whether code of this file name is torch's or ours. Code without a file, as in `python -c`, is neither."""
    return filename.startswith((_TORCH, _HERE))


def is_user_file(filename: str) -> bool:
    """Whether this is a file of the user's code. Code without a file, some of which Python and torch make, is none."""
    return not (is_library(filename) or filename.startswith("<") or filename in _DECORATORS)


def _location(filename: str, line: int) -> str:
    return f"{filename}:{line}"


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours, or an empty string."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def user_line_of(traceback: TracebackType | None) -> str:
    """The same for the place where an exception was raised."""
    found = ""
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _location(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
