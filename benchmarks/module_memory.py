"""Gloo ranks on loopback: the peak memory of the module form against DistributedDataParallel, in the same loop.

Each variant of each workload runs in processes of its own, in which glibc gives freed tensors back to the system at
once; so resident memory is live memory. What is compared is the highest resident memory of rank 0 from before the
model is made, through compiling and the first steps, less what the process had after it trained a small model in the
same way.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commfuse_fx as cf
from benchmarks.measure import MIB, RETURNING, peak_bytes, reset_peak, resident_bytes, save
from benchmarks.peers import PEERS
from benchmarks.workloads import MLP, Workload, gpt2
from benchmarks.workloads import WORKLOADS as STEP_WORKLOADS

VARIANTS = ("DDP", "module form")
STEPS = 5

WORKLOADS = {**STEP_WORKLOADS, "gpt2 wide": replace(STEP_WORKLOADS["gpt2"], model=lambda: gpt2(12, 768))}

SMALL = replace(WORKLOADS["mlp"], model=lambda: MLP(blocks=1))
"""What is trained first in the same way: the libraries are then loaded, the ranks connected."""


def train(variant: str, workload: Workload) -> None:
    torch.manual_seed(0)
    step = PEERS[variant](workload, workload.model())
    for _ in range(STEPS):
        step()


def worker(variant: str, workload: Workload, out: Path) -> None:
    cf.init()
    train(variant, SMALL)
    gc.collect()
    before = resident_bytes()
    reset_peak()
    train(variant, workload)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"peak": peak_bytes() - before, "before": before}))
    dist.destroy_process_group()


def measure(variant: str, workload: str) -> dict[str, int]:
    """Bytes: the peak above the process, and what the process had before."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "benchmarks", "module_memory", "--worker", str(out)]
        command += ["--variant", variant, "--workloads", workload]
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
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.variant, WORKLOADS[options.workloads[0]], Path(options.worker))
        return
    results: dict[str, Any] = {}
    print(f"{'workload':12} {'DDP MiB':>9} {'module MiB':>11} {'module / DDP':>13}")
    for workload in options.workloads:
        found: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant in VARIANTS:
                found[variant].append(measure(variant, workload)["peak"])
        ddp, module = (statistics.median(found[variant]) for variant in VARIANTS)
        results[workload] = {"peaks": found, "ratio": module / ddp}
        print(f"{workload:12} {ddp / MIB:9.1f} {module / MIB:11.1f} {module / ddp:13.3f}", flush=True)
    print(f"written to {save('module_memory', results)}")
