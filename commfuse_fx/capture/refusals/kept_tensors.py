"""Refuse hooks that keep a tensor of the trace: the tensor has no values, and compiled calls run no hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from commfuse_fx.errors import CaptureError


def refuse_kept_tensors(model: nn.Module) -> None:
    """After a trace: raise CaptureError if a hook of the model has put a traced tensor into a container or object."""
    for owner, hook in _hooks(model):
        for name, value in _reached(hook):
            if _holds_traced(value):
                raise CaptureError(
                    f"a hook of {owner} keeps a tensor of the trace in {name}: it has no values there, and the hook "
                    "runs once per graph only. Return the tensor from the model to see it, or remove the hook"
                )


def _hooks(model: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for path, module in model.named_modules():
        held = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for hooks in held:
            for hook in hooks.values():
                yield f"module {path}" if path else "the model", hook
    for name, param in model.named_parameters():
        for hook in (param._backward_hooks or {}).values():
            yield f"parameter {name}", hook


def _reached(hook: Any) -> Iterator[tuple[str, Any]]:
    """Objects into which a hook can put a tensor, by name: its closure and globals, its object, bound arguments."""
    if isinstance(hook, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(hook.args))
        yield from hook.keywords.items()
        yield from _reached(hook.func)
    elif isinstance(hook, MethodType):
        yield from getattr(hook.__self__, "__dict__", {}).items()
        yield from _reached(hook.__func__)
    elif isinstance(hook, FunctionType):
        with suppress(ValueError):  # a variable around it that is not set yet
            around = inspect.getclosurevars(hook)
            yield from {**around.nonlocals, **around.globals}.items()
    else:
        yield from getattr(hook, "__dict__", {}).items()


def _holds_traced(value: Any, deeper: int = 2) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if deeper == 0 or isinstance(value, (nn.Module, type, FunctionType)):
        return False
    if isinstance(value, Mapping):
        return any(_holds_traced(item, deeper - 1) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_traced(item, deeper - 1) for item in value)
    return type(value).__module__ != "builtins" and any(
        _holds_traced(item, deeper - 1) for item in getattr(value, "__dict__", {}).values()
    )
