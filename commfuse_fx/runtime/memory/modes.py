"""Run ops without the modes of torch that the caller has turned on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Inside the `with` block new tensors are ordinary ones, even if the caller is in torch.inference_mode().

    Inference tensors could not stay in parameters, optimizer states and flat storage. Gradients stay disabled in
    inference mode; outside of it the block does nothing.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def outside_modes() -> Iterator[None]:
    """Inside the `with` block ops run eagerly, without gradients, autocast or inference mode.

    No mode or transform of the caller sees them (FakeTensorMode, make_fx, a default device, vmap), and guarded tensors
    behave like ordinary ones.
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
