"""Run ops as they are, whatever the caller has told torch to do with his own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is made here is an ordinary tensor, which may stay in parameters, optimizer state and flat storage.

    Inside of torch.inference_mode() gradients stay disabled; anywhere else nothing changes.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def outside_modes() -> Iterator[None]:
    """No gradients, no autocast, no inference mode, and no mode or transform sees an op: FakeTensorMode, make_fx, a
    default device, vmap.

    Guarded tensors are tensors like any other.
    """
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
        outside_inference_mode(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield
