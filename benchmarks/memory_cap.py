"""Gloo ranks on loopback: the peak memory of a step under ScheduleConfig(memory_limit=...), predicted and measured.

Each limit runs in processes of its own, in which glibc gives freed tensors back to the system at once; so resident
memory is live memory. The model is a GPT-2, with AdamW and buckets of 4 MiB that are kept between steps unless the
limit leaves no room.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commfuse_fx as cf
from benchmarks.measure import MIB, RETURNING, peak_bytes, reset_peak, resident_bytes, save
from benchmarks.workloads import WORKLOADS, gpt2
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.ir.core.meta import info

FUSION = {"allreduce": {"mode": "size", "config": 4}}
CLUSTER = "gloo-10gbit"
RANKS = 2


def make_step(layers: int, width: int, limit: int | None, **world: Any) -> cf.CompiledStep:
    torch.manual_seed(0)
    model = gpt2(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = cf.ScheduleConfig(memory_limit=limit)
    return cf.compile(model, FUSION, optimizer=optimizer, cluster=CLUSTER, schedule=schedule, **world)


def simulated_peak(layers: int, width: int, limit: int | None) -> int:
    """Bytes, with nothing run. Raises ConfigValueError for a limit that nothing fits into."""
    args, kwargs = WORKLOADS["gpt2"].batch(0)
    return peak_memory(make_step(layers, width, limit, device_num=RANKS).lower(*args, **kwargs).program)


def least_limit(layers: int, width: int) -> int:
    """The smallest limit that the step fits into, as the error for a smaller one says."""
    try:
        simulated_peak(layers, width, 1)
    except cf.ConfigValueError as error:
        found = re.search(r"what the step needs: (\d+) bytes", str(error))
        if found:
            return int(found[1])
        raise
    raise RuntimeError("a step that fits into one byte")


def limits(least: int, most: int) -> list[int | None]:
    """No limit, and three between the smallest and the peak without one."""
    return [None, *(least + (most - least) * part // 4 for part in (3, 2, 0))]


def baseline(layers: int) -> int:
    """Resident bytes of a process that has imported all, and has trained a narrow model of as many nodes and let go of
    it: what compiling leaves behind is there."""
    args, kwargs = WORKLOADS["gpt2"].batch(dist.get_rank())
    step = make_step(layers, 16, None)
    for _ in range(2):
        step(*args, **kwargs)
    del step
    gc.collect()
    return resident_bytes()


def worker(layers: int, width: int, limit: int | None, rounds: int, out: Path) -> None:
    cf.init()
    before = baseline(layers)
    args, kwargs = WORKLOADS["gpt2"].batch(dist.get_rank())
    step = make_step(layers, width, limit)
    times: list[float] = []
    peaks: list[int] = []
    for number in range(2 + rounds):
        dist.barrier()
        reset_peak()
        begin = time.perf_counter()
        step(*args, **kwargs)
        if number >= 2:
            times.append(time.perf_counter() - begin)
            peaks.append(peak_bytes() - before)
    program = step.lower(*args, **kwargs).program
    if dist.get_rank() == 0:
        kept = sum(info(node).kept for node in program.graph.nodes)
        row = {
            "limit": limit,
            "simulated": peak_memory(program),
            "measured": statistics.median(peaks),
            "kept_buckets": kept,
            "ms": statistics.median(times) * 1e3,
        }
        out.write_text(json.dumps(row))
    dist.destroy_process_group()


def measure(layers: int, width: int, limit: int | None, rounds: int) -> dict[str, Any]:
    """One limit, in ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["-m", "benchmarks", "memory_cap", "--worker", str(out), "--limit", str(limit or 0)]
        command += ["--layers", str(layers), "--width", str(width), "--rounds", str(rounds)]
        subprocess.run(command, check=True, env={**os.environ, **RETURNING})
        row: dict[str, Any] = json.loads(out.read_text())
    return {**row, "ratio": row["measured"] / row["simulated"]}


def table_line(row: dict[str, Any]) -> str:
    limit = "none" if row["limit"] is None else f"{row['limit'] / MIB:.1f}"
    return (
        f"{limit:>9} {row['kept_buckets']:7} {row['simulated'] / MIB:14.1f} {row['measured'] / MIB:13.1f} "
        f"{row['ratio']:20.3f} {row['ms']:8.0f}"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks memory_cap", description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps for each limit")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.layers, options.width, options.limit or None, options.rounds, Path(options.worker))
        return
    least = least_limit(options.layers, options.width)
    most = simulated_peak(options.layers, options.width, None)
    rows: list[dict[str, Any]] = []
    names = f"{'simulated MiB':>14} {'measured MiB':>13} {'measured / simulated':>20} {'ms':>8}"
    print(f"{'limit MiB':>9} {'kept':>7} {names}")
    for limit in limits(least, most):
        rows.append(measure(options.layers, options.width, limit, options.rounds))
        print(table_line(rows[-1]), flush=True)
    print(f"written to {save('memory_cap', rows)}")
