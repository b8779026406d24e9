"""A step that is compiled without some of the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

import commfuse_fx as cf
from benchmarks.workloads import LEARNING_RATE, Workload


def step_without(passes: Sequence[type[Any]], workload: Workload) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = cf.compile(model, loss_fn=workload.loss_fn, form="step", optimizer=optimizer)
    args, kwargs = workload.batch(0)
    with ExitStack() as patches:
        for each in passes:
            patches.enter_context(patch.object(each, "when", lambda situation: None))
        step(*args, **kwargs)
    return lambda: step(*args, **kwargs)
