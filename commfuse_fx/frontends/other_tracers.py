"""Refuses calls of a compiled module from what records, exports or transforms programs itself."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from commfuse_fx.errors import NotAvailableError


def refuse_other_tracers() -> None:
    """Raise NotAvailableError inside of torch.func transforms, and where torch records what runs."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotAvailableError(
            "a compiled module runs inside of torch.func.grad, vmap or another of their kind, which have gradients "
            "of their own: hand them the model itself (model.module)"
        )
    if torch._C._is_tracing() or get_proxy_mode() is not None or _has_fake_tensors():
        raise NotAvailableError(
            "a compiled module runs inside of torch.jit.trace, torch.export, an ONNX export or another function that "
            "records or calls it without values: hand it the model itself (model.module)"
        )


def _has_fake_tensors() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
