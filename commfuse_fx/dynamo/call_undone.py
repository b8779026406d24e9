"""What it takes to run a model's own code and have changed none of its tensors.

Why: docs/decisions.md, "`lower()` with Dynamo in front runs the model's code".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def call_undone(model: nn.Module) -> Iterator[None]:
    """After the block parameters, buffers, `.grad`, modes and random generators are what they were before.

    The generators are those of torch, NumPy and Python. Attributes that the model's code sets stay set. The block
    holds a copy of parameters and buffers.
    """
    modules = [(module, dict(module._parameters), dict(module._buffers), module.training) for module in model.modules()]
    tensors = [*dict.fromkeys([*model.parameters(), *model.buffers()])]
    kept = [tensor.detach().clone() for tensor in tensors]
    grads = [(param, param.grad) for param in model.parameters()]
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_python = random.getstate()
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
    try:
        with torch.random.fork_rng(devices), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, before in zip(tensors, kept, strict=True):
                        tensor.copy_(before)
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for module, params, buffers, training in modules:
            _restore(module._parameters, params)
            _restore(module._buffers, buffers)
            module.training = training
        for param, grad in grads:
            param.grad = grad


def _restore(held: dict[str, Any], before: dict[str, Any]) -> None:
    if len(held) != len(before) or any(held.get(name) is not value for name, value in before.items()):
        held.clear()
        held.update(before)
