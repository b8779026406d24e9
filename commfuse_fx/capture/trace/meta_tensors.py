"""Tensors on the meta device have no memory. A trace lets them stand for tensors on a device that has some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.errors import CaptureError

OTHER_META = (
    "a tensor on the meta device is used there that is no parameter, buffer or input: register it as a buffer "
    "(persistent=False keeps it out of checkpoints), or make it on another device"
)


def device_of(model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> torch.device:
    """Where a step runs: on the device of the first parameter, buffer or input that is not on meta; if all are there,
    on the CPU."""
    own = (*model.parameters(), *model.buffers(), *inputs)
    return next((tensor.device for tensor in own if not tensor.is_meta), torch.device("cpu"))


def traced_tensor(fake: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of a trace in place of the given one. device: where one on meta is to be."""
    if not tensor.is_meta:
        return fake.from_tensor(tensor)
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def is_of_meta(error: RuntimeError) -> bool:
    """Whether torch's error says that a tensor on meta meets one of another device."""
    text = str(error).splitlines()[0] if str(error) else ""
    return "meta" in text and ("different devices" in text or "at least two devices" in text)


def check_memory(model: nn.Module, inputs: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises CaptureError for a parameter, buffer or input that has no memory, with which a step cannot run."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise CaptureError(
                    f"{kind} {name} is on the meta device, so that a call can be lowered but not run: give the model "
                    'memory with model.to_empty(device="cpu"), or on another device, and load its values; then make '
                    "the optimizer, and compile"
                )
    for path, tensor in inputs:
        if tensor.is_meta:
            raise CaptureError(
                f"{path} is on the meta device, so that the call can be lowered but not run: pass a tensor with values"
            )
