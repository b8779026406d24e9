"""Which files hold the user's code: not torch's, not ours, and not those of decorators that wrap functions of torch."""

from __future__ import annotations

import contextlib
import functools
import os

import torch
import typing_extensions

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DECORATORS = (contextlib.__file__, functools.__file__, typing_extensions.__file__)


def is_user_file(filename: str) -> bool:
    return not filename.startswith((_TORCH, _HERE, "<")) and filename not in _DECORATORS
