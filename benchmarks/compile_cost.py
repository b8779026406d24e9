"""What compiling costs: the 12-layer GPT-2, and the passes alone on growing graphs in a world of 8."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.workloads import WORKLOADS, ManySmall
from commfuse_fx.pipeline import PassRecord


def compile_seconds(model: torch.nn.Module, loss_fn: Any, args: Any, kwargs: Any) -> tuple[float, list[PassRecord]]:
    """Wall time of tracing and compiling for rank 0 of 8, and the record of each pass."""
    step = cf.compile(
        model, loss_fn=loss_fn, optimizer=torch.optim.AdamW(model.parameters()), device_num=8, global_rank=0
    )
    start = time.perf_counter()
    lowered = step.lower(*args, **kwargs)
    return time.perf_counter() - start, lowered.pass_records


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks compile_cost", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[250, 500, 1000, 2000], help="sizes of the deep MLP")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    print(f"{'model':16} {'nodes':>8} {'total s':>8} {'passes s':>9}  slowest pass")
    gpt2 = WORKLOADS["gpt2"]
    cases = [("gpt2 x12", gpt2.model(), gpt2.loss_fn, *gpt2.batch(0))]
    for layers in options.layers:
        workload = WORKLOADS["many_small"]
        cases.append(
            (f"mlp x{layers}", ManySmall(8, layers), workload.loss_fn, (torch.ones(2, 8), torch.zeros(2).long()), {})
        )
    for name, model, loss_fn, args, kwargs in cases:
        total, records = compile_seconds(model, loss_fn, args, kwargs)
        passes = sum(record.seconds for record in records)
        slowest = max(records, key=lambda record: record.seconds)
        nodes = max(record.nodes_before for record in records)
        results[name] = {
            "nodes": nodes,
            "total_s": total,
            "passes_s": passes,
            "by_pass": {record.name: record.seconds for record in records},
        }
        print(f"{name:16} {nodes:8} {total:8.2f} {passes:9.3f}  {slowest.name} {slowest.seconds:.3f}")
    print(f"written to {save('compile_cost', results)}")
