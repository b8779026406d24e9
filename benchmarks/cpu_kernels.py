"""One process: what each pass of passes/kernels brings to a step of the convnet, on the CPU's own instructions.

With `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` in the environment a CPU with AVX-512
computes as one without it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

import commfuse_fx as cf
from benchmarks.measure import interleave, ratios, save
from benchmarks.workloads import WORKLOADS
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.passes.kernels.weight_gradients import WeightGradients

OFF: dict[str, Sequence[type[Any]]] = {
    "neither": (ChannelsLast, WeightGradients),
    "weight_gradients": (ChannelsLast,),
    "channels_last": (WeightGradients,),
    "both": (),
}
"""Passes that run -> those that are left out. draw_masks is for several ranks, so it does not run here."""


def made(off: Sequence[type[Any]]) -> Callable[[], Any]:
    """The step without these passes."""
    torch.manual_seed(0)
    workload = WORKLOADS["convnet"]
    model = workload.model()
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=torch.optim.AdamW(model.parameters()))
    args, kwargs = workload.batch(0)
    with ExitStack() as patches:
        for each in off:
            patches.enter_context(patch.object(each, "when", lambda situation: None))
        step(*args, **kwargs)
    return lambda: step(*args, **kwargs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant (default 15)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = interleave({name: made(off) for name, off in OFF.items()}, given.rounds)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{capability}\n{'passes':18} {'ms':>7} {'ratio':>7}     (quartiles)")
    for name in OFF:
        low, middle, high = ratios(times, name, "neither")
        print(f"{name:18} {statistics.median(times[name]) * 1e3:7.1f} {middle:7.3f}     ({low:.3f}-{high:.3f})")
    print(f"written to {save('cpu_kernels', {'capability': capability, 'seconds': times})}")
