"""Gloo ranks on loopback: the peak memory of the module form against DistributedDataParallel, in the same loop. With
`--backend inductor` the module's compute is compiled, and DistributedDataParallel gets what torch.compile makes.

Each variant of each workload runs in processes of its own, in which glibc gives freed tensors back to the system at
once; so resident memory is live memory. What is compared is the highest resident memory of rank 0 from before the
model is made, through compiling and the first steps, less what the process had after it trained a small model in the
same way. With Inductor it is the highest of the steps after the second one, as compiling takes more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from benchmarks.measure import MIB, RETURNING, peak_bytes, reset_peak, resident_bytes, save
from benchmarks.peers import Step, compiled_ddp, compiled_module, ddp, module
from benchmarks.workloads import MLP, Workload, gpt2
from benchmarks.workloads import WORKLOADS as STEP_WORKLOADS

VARIANTS = {"eager": {"DDP": ddp, "module": module}, "inductor": {"DDP": compiled_ddp, "module": compiled_module}}
"""By backend: what is compared with, and the module form."""

STEPS = 5

WORKLOADS = {**STEP_WORKLOADS, "gpt2 wide": replace(STEP_WORKLOADS["gpt2"], model=lambda: gpt2(12, 768))}

SMALL = replace(WORKLOADS["mlp"], model=lambda: MLP(blocks=1))
"""What is trained first in the same way: the libraries are then loaded, the ranks connected."""


def train(make: Callable[[Workload, nn.Module], Step], workload: Workload, forget_first: bool) -> None:
    """forget_first: whether what the first steps take does not count."""
    torch.manual_seed(0)
    step = make(workload, workload.model())
    for number in range(STEPS):
        if forget_first and number == 2:
            gc.collect()
            reset_peak()
        step()


def worker(backend: str, variant: str, workload: Workload, out: Path) -> None:
    make = VARIANTS[backend][variant]
    cf.init()
    train(make, SMALL, False)
    gc.collect()
    before = resident_bytes()
    reset_peak()
    train(make, workload, backend == "inductor")
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"peak": peak_bytes() - before, "before": before}))
    dist.destroy_process_group()


def measure(backend: str, variant: str, workload: str) -> dict[str, int]:
    """Bytes: the peak above the process, and what the process had before."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "benchmarks", "module_memory", "--worker", str(out)]
        command += ["--backend", backend, "--variant", variant, "--workloads", workload]
        subprocess.run(command, check=True, env={**os.environ, **RETURNING})
        row: dict[str, int] = json.loads(out.read_text())
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks module_memory", description=__doc__)
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["mlp", "gpt2", "gpt2 wide", "bert", "convnet"],
        choices=sorted(WORKLOADS),
        metavar="NAME",
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each variant, in turns")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="eager", choices=VARIANTS)
    parser.add_argument("--variant", choices=VARIANTS["eager"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.backend, options.variant, WORKLOADS[options.workloads[0]], Path(options.worker))
        return
    results: dict[str, Any] = {}
    print(f"{'workload':12} {'DDP MiB':>9} {'module MiB':>11} {'module / DDP':>13}")
    for workload in options.workloads:
        variants = VARIANTS[options.backend]
        found: dict[str, list[int]] = {variant: [] for variant in variants}
        for _ in range(options.rounds):
            for variant in variants:
                found[variant].append(measure(options.backend, variant, workload)["peak"])
        ddp, module = (statistics.median(found[variant]) for variant in variants)
        results[workload] = {"peaks": found, "ratio": module / ddp}
        print(f"{workload:12} {ddp / MIB:9.1f} {module / MIB:11.1f} {module / ddp:13.3f}", flush=True)
    print(f"written to {save(f'module_memory_{options.backend}', results)}")
