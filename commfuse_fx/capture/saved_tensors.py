"""Keep hooks of saved tensors, such as those of activation checkpointing around a model, out of its trace."""

from __future__ import annotations

from collections.abc import Iterator
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


def _unchanged(value: Any) -> Any:
    return value
