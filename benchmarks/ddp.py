"""Two Gloo ranks on loopback: a compiled step against DistributedDataParallel, steps interleaved in one run.

One core per rank. AdamW with default settings and with fused=True for DDP; the compiled step is the
same for both, because it always runs the fused kernel. The module form has DDP's loop, with fused=True.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from benchmarks.measure import interleave, ratios, save
from benchmarks.workloads import WORKLOADS, Workload, eager_loss

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "size 25": {"comm_fusion": {"allreduce": {"mode": "size", "config": 25}}},
    "off": {"comm_fusion": {"openstate": False}},
    "plain kernels": {"cpu_kernels": False},
}
"""Name of a compiled variant -> options of `compile`. In a model without convolutions, the one pass that "auto" has and
"plain kernels" has not is draw_masks."""


def ddp_step(workload: Workload, model: torch.nn.Module, fused: bool) -> Callable[[], Any]:
    return loop(workload, model, DistributedDataParallel(model), fused)


def module_step(workload: Workload, model: torch.nn.Module) -> Callable[[], Any]:
    return loop(workload, model, cf.compile(model), fused=True)


def loop(workload: Workload, model: torch.nn.Module, wrapped: torch.nn.Module, fused: bool) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    args, kwargs = workload.batch(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        eager_loss(workload, wrapped, args, kwargs).backward()
        optimizer.step()

    return step


def compiled_step(workload: Workload, model: torch.nn.Module, options: dict[str, Any]) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer, **options)
    args, kwargs = workload.batch(dist.get_rank())
    return lambda: step(*args, **kwargs)


def worker(workload: Workload, rounds: int, out: Path) -> None:
    cf.init()
    torch.manual_seed(0)
    model = workload.model()
    steps: dict[str, Callable[[], Any]] = {}
    for name, fused in (("ddp", False), ("ddp fused", True)):
        steps[name] = ddp_step(workload, copy.deepcopy(model), fused)
    steps["module form"] = module_step(workload, copy.deepcopy(model))
    for name, options in OPTIONS.items():
        steps[f"compiled {name}"] = compiled_step(workload, copy.deepcopy(model), options)

    def together(step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            dist.barrier()
            step()

        return run

    times = interleave({name: together(step) for name, step in steps.items()}, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks ddp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--workloads", nargs="+", default=["mlp", "gpt2", "convnet", "many_small"], choices=sorted(WORKLOADS)
    )
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(WORKLOADS[options.workloads[0]], options.rounds, Path(options.worker))
        return
    results: dict[str, Any] = {}
    print(f"{'workload':12} {'variant':18} {'ms':>8} {'/ ddp':>7} {'/ ddp fused':>12}")
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={options.ranks}",
            ]
            command += ["-m", "benchmarks", "ddp", "--worker", str(out), "--workloads", workload]
            command += ["--rounds", str(options.rounds)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            times: dict[str, list[float]] = json.loads(out.read_text())
        for name, values in times.items():
            row = {
                "ms": statistics.median(values) * 1e3,
                "ratio_to_ddp": ratios(times, name, "ddp")[1],
                "ratio_to_ddp_fused": ratios(times, name, "ddp fused")[1],
            }
            results[f"{workload}.{name}"] = row
            print(
                f"{workload:12} {name:18} {row['ms']:8.1f} {row['ratio_to_ddp']:7.3f} {row['ratio_to_ddp_fused']:12.3f}"
            )
    print(f"written to {save('ddp', results)}")
