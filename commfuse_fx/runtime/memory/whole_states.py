"""What `optimizer.state_dict()` returns where ranks hold parts of its states: whole tensors, gathered on all ranks.

Why: docs/decisions.md, "The user's parameters stay whole in shape".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from commfuse_fx.runtime.memory.guard import finish_others

_IN_PARTS = ContextVar("in_parts", default=False)


def gather_for_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """From now on `optimizer.state_dict()` gathers the states, on all ranks together.

    One rank may then save what it returns. Copies of the optimizer do not have the hook, as torch copies none.
    """
    if _gather not in optimizer._optimizer_state_dict_pre_hooks.values():
        optimizer.register_state_dict_pre_hook(_gather)


@contextmanager
def states_in_parts() -> Iterator[None]:
    """Inside the `with` block, `state_dict()` of an optimizer leaves its states as they are, and no rank waits."""
    token = _IN_PARTS.set(True)
    try:
        yield
    finally:
        _IN_PARTS.reset(token)


def _gather(optimizer: torch.optim.Optimizer) -> None:
    if not _IN_PARTS.get():
        held = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
        finish_others(value for value in held if isinstance(value, torch.Tensor))
