"""What a trace saves for its backward: hooks from outside do not see it, and nobody may change it in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def outer_hooks_masked() -> Iterator[None]:
    """Inside the `with` block hooks of saved tensors that were set before see nothing: they would take what a trace
    saves for what the model does. Those that the model sets itself work."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        yield


class ChangesOfSaved:
    """The changes in place of a trace. Autograd refuses a backward that reads what has been changed since.

    It goes by versions, which torch does not raise where ops change a list of fake tensors (`torch._foreach_add_`).
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, None]] = {}  # by the shape of the memory's owner, as in autograd's message

    def note(self, op: Any, changed: Any, versions: Sequence[int], place: str) -> None:
        """An op has changed these tensors, or this one. versions: those before. place: as in `Origin`."""
        for tensor, version in zip(_tensors(changed), versions, strict=True):
            if isinstance(changed, (list, tuple)) and tensor._version == version:
                torch.autograd.graph.increment_version(tensor)
            owner = tensor if tensor._base is None else tensor._base
            self._lines.setdefault(str(list(owner.shape)), {})[f"{op} {place}"] = None

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The error of autograd, with the lines that it may be about."""
        shape = re.search(r"Tensor (\[[\d, ]*\])\]", str(error))
        lines = self._lines.get(shape[1]) if shape else None
        if not lines:
            return error
        return RuntimeError(f"{error} [such tensors are changed in place by {', '.join(lines)}]")


def versions_of(changed: Any) -> list[int]:
    """The versions of tensors that an op is about to change."""
    return [tensor._version for tensor in _tensors(changed)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, torch.Tensor)]


def _unchanged(value: Any) -> Any:
    return value
