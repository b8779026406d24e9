"""Gloo ranks on loopback: the peak memory of a step whose update is divided among them, predicted and measured.

Each level of the parallel optimizer runs in processes of its own, in which glibc gives freed tensors back to the system
at once; so resident memory is live memory. The model is a GPT-2, with AdamW and buckets of 4 MiB. What a process has
after it has trained a narrow model of as many nodes is taken off.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commfuse_fx as cf
from benchmarks.measure import MIB, RETURNING, at_least, peak_bytes, reset_peak, resident_bytes, save
from benchmarks.workloads import WORKLOADS, gpt2
from commfuse_fx.cost.memory import peak_memory

FUSION = {kind: {"mode": "size", "config": 4} for kind in ("allreduce", "allgather", "reducescatter")}
LEVELS = (0, 1, 2, 3)
"""0: nothing is divided."""


def make_step(layers: int, width: int, level: int) -> cf.CompiledStep:
    torch.manual_seed(0)
    model = gpt2(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    divided = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": level, "pad": True}}
    return cf.compile(model, FUSION, optimizer=optimizer, **(divided if level else {}))


def worker(layers: int, width: int, level: int, rounds: int, out: Path) -> None:
    cf.init()
    args, kwargs = WORKLOADS["gpt2"].batch(dist.get_rank())
    narrow = make_step(layers, 16, level)
    for _ in range(2):
        narrow(*args, **kwargs)
    del narrow
    gc.collect()
    before = resident_bytes()
    step = make_step(layers, width, level)

    def measured() -> float:
        peaks: list[int] = []
        for number in range(2 + rounds):
            dist.barrier()
            reset_peak()
            step(*args, **kwargs)
            if number >= 2:
                peaks.append(peak_bytes() - before)
        return statistics.median(peaks)

    row = {"level": level, "measured": measured(), "simulated": peak_memory(step.lower(*args, **kwargs).program)}
    step.model.eval()
    row["evaluation"] = measured()
    for param in step.model.parameters():
        param.detach().view(-1)[0].item()  # all ranks read it, and it stays whole
    row["evaluation_of_whole"] = measured()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(row))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, level: int) -> dict[str, Any]:
    """One level, in ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += ["-m", "benchmarks", "divided_memory", "--worker", str(out), "--level", str(level)]
        for name in ("layers", "width", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run(command, check=True, env={**os.environ, **RETURNING})
        row: dict[str, Any] = json.loads(out.read_text())
    return {**row, "ratio": row["measured"] / row["simulated"]}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks divided_memory", description=__doc__)
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--width", type=at_least(16), default=512)
    parser.add_argument("--ranks", type=at_least(2), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="measured steps for each level")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--level", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.layers, options.width, options.level, options.rounds, Path(options.worker))
        return
    head = (
        "level",
        "simulated MiB",
        "measured MiB",
        "measured / simulated",
        "evaluation MiB",
        "of whole parameters MiB",
    )
    print("{:>5} {:>14} {:>13} {:>20} {:>15} {:>24}".format(*head))
    rows = []
    for level in LEVELS:
        rows.append(row := measure(options, level))
        print(
            f"{level:5} {row['simulated'] / MIB:14.1f} {row['measured'] / MIB:13.1f} {row['ratio']:20.3f} "
            f"{row['evaluation'] / MIB:15.1f} {row['evaluation_of_whole'] / MIB:24.1f}",
            flush=True,
        )
    print(f"written to {save('divided_memory', rows)}")
