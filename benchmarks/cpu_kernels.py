"""One process: what each pass of passes/kernels brings to a step of the convnet, on the CPU's own instructions.

With `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` in the environment a CPU with AVX-512
computes as one without it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import interleave, ratios, save
from benchmarks.without_passes import step_without
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant (default 15)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = interleave({name: step_without(off, WORKLOADS["convnet"]) for name, off in OFF.items()}, given.rounds)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{capability}\n{'passes':18} {'ms':>7} {'ratio':>7}     (quartiles)")
    for name in OFF:
        low, middle, high = ratios(times, name, "neither")
        print(f"{name:18} {statistics.median(times[name]) * 1e3:7.1f} {middle:7.3f}     ({low:.3f}-{high:.3f})")
    print(f"written to {save('cpu_kernels', {'capability': capability, 'seconds': times})}")
