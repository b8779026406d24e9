"""Run ops as they are, whatever the caller has told torch to do with his own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """No gradients, no autocast, and no mode or transform sees an op: FakeTensorMode, make_fx, a default device, vmap.

    Guarded tensors are tensors like any other.
    """
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield
