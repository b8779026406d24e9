"""Hugging Face Accelerate asks by class whether a model is wrapped. Here its methods learn to ask a compiled module.

Nothing is imported, and nothing changes for models of other classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TAUGHT = "_knows_compiled_modules_of_commfuse"


def teach_accelerate(compiled: Any) -> None:
    """Let `unwrap_model` of an Accelerator return the model of a compiled module, and `trigger_sync_in_backward` have
    its gradients reduced, if Accelerate has been imported.

    compiled: the class of compiled modules.
    """
    accelerator: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None or hasattr(accelerator, _TAUGHT):
        return
    unwrap, trigger = accelerator.unwrap_model, accelerator.trigger_sync_in_backward

    @functools.wraps(unwrap)
    def unwrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return unwrap(self, model.module if isinstance(model, compiled) else model, *args, **kwargs)

    @functools.wraps(trigger)
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        with model.sync_in_backward() if isinstance(model, compiled) else trigger(model):
            yield

    accelerator.unwrap_model = unwrap_model
    accelerator.trigger_sync_in_backward = staticmethod(trigger_sync_in_backward)
    setattr(accelerator, _TAUGHT, True)
