"""Give a model stand-ins for its parameters and buffers while it is traced, and clean it up afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from commfuse_fx.errors import CaptureError

log = logging.getLogger("commfuse_fx.trace")

_OWN = ("_parameters", "_buffers", "_modules")

_VALUES_IN_PYTHON = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__")
)
"""Functions that give Python the values of a tensor. Traced tensors have none."""


@contextmanager
def substituted(
    model: nn.Module,
    stand_ins: Mapping[torch.Tensor, torch.Tensor],
    set_data: Callable[[torch.Tensor, torch.Tensor], None],
    on_values: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> Iterator[None]:
    """Inside the `with` block the model has stand-ins for its parameters and buffers; afterwards it has its own again.

    stand_ins: the stand-in of each tensor. Tensors are compared by identity, so tied tensors stay tied. References that
        were taken earlier (by a regulariser, a hook, the weight list of an LSTM) mean the stand-in too.
    set_data: called as set_data(target, value) for `target.data = value` on a traced tensor.
    on_values: called with each tensor that is not traced and whose values are read in Python.
    """
    slots = [
        (module, owned, name, value)
        for module in model.modules()
        for owned in (module._parameters, module._buffers)
        for name, value in owned.items()
    ]
    held = [(own, dict(own)) for module in model.modules() for own in map(vars(module).__getitem__, _OWN)]
    by_id = {id(tensor): stand_in for tensor, stand_in in stand_ins.items()}
    try:
        for module, _, name, value in slots:
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])  # not through the slots: modules such as LSTM listen
        with _References(by_id, set_data, on_values):
            yield
    finally:
        for module, owned, name, value in slots:
            if owned.get(name) is not value:
                setattr(module, name, value)
        for own, before in held:
            if list(own) != list(before) or any(own[name] is not value for name, value in before.items()):
                own.clear()
                own.update(before)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET = tuple(getattr(torch.ops.aten.set_, overload) for overload in torch.ops.aten.set_.overloads())


class _References(TorchFunctionMode):
    """Replaces the tensors in the arguments of every torch function."""

    def __init__(
        self,
        by_id: Mapping[int, torch.Tensor],
        set_data: Callable[[torch.Tensor, torch.Tensor], None],
        on_values: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._by_id = by_id
        self._set_data = set_data
        self._on_values = on_values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _VALUES_IN_PYTHON and type(args[0]) is torch.Tensor and id(args[0]) not in self._by_id:
            self._on_values(args[0])
        if func == _SET_DATA and is_traced(target := self._other(args[0])):
            self._set_data(target, self._other(args[1]))
            return None
        if func in _SET and any(args[0] is stand_in for stand_in in self._by_id.values()):
            raise CaptureError("the model gives a parameter or buffer other memory with set_(): write it with copy_()")
        return func(*map(self._other, args), **{name: self._other(value) for name, value in given.items()})

    def _other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._by_id.get(id(value), value)
        if type(value) in (list, tuple):
            if any(id(item) in self._by_id for item in value):
                return type(value)(map(self._other, value))
        return value


class Attributes:
    """The plain attributes of all modules, so that a traced forward leaves no traced tensors in them.

    A compiled step cannot update such attributes, only parameters and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (name, module, {key: _shallow(value) for key, value in vars(module).items() if key not in _OWN})
            for name, module in model.named_modules()
        ]

    def restore(self) -> list[torch.Tensor]:
        """Restore every attribute that holds a traced tensor; returns the restored values that are tensors."""
        replaced: list[torch.Tensor] = []
        for path, module, held in self._held:
            for key, value in list(vars(module).items()):
                if key in _OWN or not is_traced(value):
                    continue
                name = f"{path}.{key}" if path else key
                original, content = held.get(key, (None, None))
                if isinstance(original, torch.Tensor):
                    replaced.append(original)
                if original is None or content is not None:
                    warn_of_stored_tensor(name)
                if key not in held:
                    delattr(module, key)
                    continue
                if content is not None and value is original:
                    value.clear()
                    value.update(content) if isinstance(value, dict) else value.extend(content)
                module.__dict__[key] = original
        return replaced

    def refusal(self, tensor: torch.Tensor) -> str:
        """The message for a forward that changes a tensor which is no parameter, buffer or input."""
        name = self._name_of(tensor)
        return (
            f"the model changes {f'its attribute {name}' if name else 'a tensor that it does not own'}: only "
            "parameters, buffers and inputs can change in a step, so make it a buffer with register_buffer()"
        )

    def _name_of(self, tensor: torch.Tensor) -> str:
        """Path of the attribute that holds this tensor, or an empty string."""
        for path, _, held in self._held:
            for key, (value, content) in held.items():
                items = content.values() if isinstance(content, dict) else content or ()
                if value is tensor or any(item is tensor for item in items):
                    return f"{path}.{key}" if path else key
        return ""


def _shallow(value: Any) -> tuple[Any, Any]:
    return value, value.copy() if type(value) in (list, dict) else None


def warn_of_stored_tensor(name: str) -> None:
    """Say that an attribute is not given the tensor that the traced forward has given it."""
    log.warning(
        "the model stores a tensor in its attribute %s during forward; a compiled step does not: "
        "return it, or make it a buffer if the next step reads it",
        name,
    )


def is_traced(value: Any) -> bool:
    """Whether this is a tensor of the trace, or a container of one."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, FakeTensor) for item in value)
    if isinstance(value, dict):
        return any(isinstance(item, FakeTensor) for item in value.values())
    return isinstance(value, FakeTensor)
