"""Handle parameters and buffers that a traced forward replaces, by assignment or through `.data`.

A compiled step only writes to the tensors that the model has. So an assigned buffer, or `param.data = ...`, becomes
such a write. Other replacements are refused, because the step would silently go on with the old tensor.

Why: docs/decisions.md, "`param.data = new` in a forward is a write; a parameter that is replaced is refused".
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.errors import CaptureError
from commfuse_fx.support.user_lines import user_line

log = logging.getLogger("commfuse_fx.trace")


class ReplacedTensors:
    """Watches one trace for replaced parameters and buffers.

    params, buffers: the stand-ins that the model has while it is traced, by name.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._model = model
        self._params = params
        self._buffers = buffers
        self._empty = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, value in module._buffers.items()
            if value is None
        }
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the `with` block, note the lines that register parameters and buffers, and follow `module.to(...)`."""

        def note(module: nn.Module, name: str, value: Any) -> None:
            self._lines[id(module), name] = user_line(sys._getframe(1))

        hooks = [register_module_parameter_registration_hook(note), register_module_buffer_registration_hook(note)]
        try:
            with patched_here(torch.utils, "swap_tensors", self.set_data):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Follow `target.data = value` in the forward. Raises CaptureError if it does more than write values."""
        named = {**self._params, **self._buffers}
        name = next((name for name, each in named.items() if each is target), None)
        if name is None:
            raise CaptureError(
                "the model sets .data of a tensor that is neither its parameter nor its buffer, which a step cannot "
                "follow: go on with the new tensor, or write to this one with copy_()"
            )
        if value.shape != target.shape or value.dtype != target.dtype:
            raise CaptureError(
                f"the model sets .data of {name} ({target.dtype}{list(target.shape)}) to "
                f"{value.dtype}{list(value.shape)}: it keeps its shape and dtype in a compiled step"
            )
        other = next((other for other, each in named.items() if other != name and _share_memory(value, each)), None)
        if other is not None:
            raise CaptureError(
                f"the model sets .data of {name} to the memory of {other}: a compiled step keeps them apart, so copy "
                "the values, with .data.copy_(other.data), or .data = other.data.clone()"
            )
        if _share_memory(value, target):
            if value.stride() == target.stride() and value.storage_offset() == target.storage_offset():
                return
            value = value.clone()
        target.data.copy_(value)  # as in eager execution, what the backward has saved does not count as changed

    def settle(self) -> None:
        """After the forward, write assigned buffers. Raises CaptureError for replacements that cannot be writes."""
        params, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        for name in (*self._params, *params):
            if name not in self._params:
                what = f"makes its parameter {name} in forward: run it once on a batch before the step is compiled"
            elif name not in params:
                what = f"removes its parameter {name} in forward: those of a compiled step stay"
            elif params[name] is not self._params[name]:
                what = (
                    f"replaces its parameter {name} in forward, and the optimizer still has the old one: write to it "
                    "under torch.no_grad(), with copy_()"
                )
            else:
                continue
            raise self._refusal(name, f"the model {what}")
        for name in self._buffers:
            if name not in buffers:
                raise self._refusal(
                    name, f"the model removes its buffer {name} in forward: a buffer of a compiled step stays one"
                )
        for name in buffers:
            if name in self._empty:
                log.warning(
                    "the model fills its empty buffer %s in forward: a compiled step computes it in every step and "
                    "does not keep it; run the model once before, if later steps should go on with the first value",
                    name,
                )
            elif name not in self._buffers:
                raise self._refusal(
                    name,
                    f"the model makes its buffer {name} in forward: run it once on a batch before the step is "
                    "compiled, or call register_buffer() in __init__",
                )
        self._write(buffers)

    def _write(self, buffers: Mapping[str, torch.Tensor]) -> None:
        assigned = [(name, held, buffers[name]) for name, held in self._buffers.items() if buffers[name] is not held]
        for name, held, value in assigned:
            if held.shape != value.shape or held.dtype != value.dtype:
                raise self._refusal(
                    name,
                    f"the model replaces its buffer {name} ({held.dtype}{list(held.shape)}) by "
                    f"{value.dtype}{list(value.shape)}: a buffer of a compiled step keeps its shape and dtype",
                )
        # Read all values before the first write, since buffers may have swapped their tensors.
        stand_ins = (*self._params.values(), *self._buffers.values())
        values = [_own_copy(value.detach(), stand_ins) for _, _, value in assigned]
        for (_, held, _), value in zip(assigned, values, strict=True):
            held.copy_(value)

    def _refusal(self, name: str, what: str) -> CaptureError:
        path, _, own = name.rpartition(".")
        modules = dict(self._model.named_modules())
        line = self._lines.get((id(modules[path]), own), "") if path in modules else ""
        where = f" at {line}" if line else ""
        return CaptureError(f"cannot trace {path or 'the top-level module'}{where}: {what}")


def _own_copy(value: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return value.clone() if any(_share_memory(value, other) for other in others) else value


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor) or one.layout != torch.strided or other.layout != torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
