"""Finds gradients that autograd adds to `.grad` after a compiled backward has reduced it: nobody reduces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")


@dataclass
class _Written:
    """Gradients that compiled modules have written in one backward, each with its version then.

    task: the number of the backward.
    """

    task: int = -1
    versions: dict[str, tuple[nn.Parameter, torch.Tensor, int]] = field(default_factory=dict)


_written = _Written()
"""In the backward that has come here last: another one that runs meanwhile is not watched to its end."""


def watch_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Call it in a backward that has written reduced gradients. At its end a warning names the first one that has
    changed since.

    Autograd adds to a `.grad` in place, when all that leads to the parameter has been run. A view has the version of
    its bucket, so all versions are read anew when another module has written.
    """
    if any(param._post_accumulate_grad_hooks for param in params.values()):
        return  # they may change gradients as they please
    task = torch._C._current_graph_task_id()
    if _written.task != task:
        _written.task, _written.versions = task, {}
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _check(task))
    held = {name: param for name, (param, _, _) in _written.versions.items()} | dict(params)
    grads = {name: (param, param.grad) for name, param in held.items()}
    _written.versions = {
        name: (param, grad, grad._version) for name, (param, grad) in grads.items() if grad is not None
    }


def _check(task: int) -> None:
    if _written.task != task:
        return
    versions, _written.versions = _written.versions, {}
    changed = (name for name, (param, grad, version) in versions.items() if _has_changed(param, grad, version))
    name = next(changed, None)
    if name is not None:
        _RUNTIME.warning(
            "%s, or a parameter of its bucket, got a gradient that does not come from the compiled module: that of a "
            "penalty on parameters, say, or of a call of model.module. It is added to the mean as it is on each rank, "
            "which is right only where it is the same on all. Otherwise compute it inside of the model's forward",
            name,
        )


def _has_changed(param: nn.Parameter, grad: torch.Tensor, version: int) -> bool:
    return param.grad is grad and grad._version != version
