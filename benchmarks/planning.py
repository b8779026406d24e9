"""What dividing a step costs: GPT-2 with a tensor-parallel plan, by layers and by devices. One process, no devices."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.workloads import gpt2

TENSOR = 8


def measure(layers: int, devices: int) -> dict[str, Any]:
    """Seconds of capture, of the passes that divide, and of all passes."""
    torch.manual_seed(0)
    model = gpt2(layers, 64)
    cf.shard(model, cf.plans.tensor_parallel(model, axis="tp"))
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(
        model,
        optimizer=optimizer,
        parallel_mode="semi_auto",
        mesh=(devices // TENSOR, TENSOR),
        device_num=devices,
        full_batch=True,
    )
    ids = torch.randint(0, 64, (devices // TENSOR, 16))
    start = time.perf_counter()
    lowered = step.lower(input_ids=ids, labels=ids)
    total = time.perf_counter() - start
    seconds = {record.name: record.seconds for record in lowered.pass_records}
    dividing = sum(seconds[name] for name in ("range_lookups", "counter_random", "divide", "lower_redistributions"))
    passes = sum(seconds.values())
    return {
        "layers": layers,
        "devices": devices,
        "nodes": len(lowered.graph_module.graph.nodes),
        "collectives": len(lowered.collectives),
        "capture_seconds": total - passes,
        "dividing_seconds": dividing,
        "passes_seconds": passes,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks planning", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512, 4096], help="multiples of 8")
    options = parser.parse_args(arguments)
    measure(1, TENSOR)  # imports and caches of torch
    rows = [measure(options.layers[0], devices) for devices in options.devices]
    rows += [measure(layers, options.devices[0]) for layers in options.layers[1:]]
    head = ("layers", "devices", "nodes", "collectives", "divide s", "all passes s", "capture s")
    print("{:>6} {:>8} {:>7} {:>12} {:>9} {:>13} {:>10}".format(*head))
    for row in rows:
        print(
            f"{row['layers']:6} {row['devices']:8} {row['nodes']:7} {row['collectives']:12} "
            f"{row['dividing_seconds']:9.2f} {row['passes_seconds']:13.2f} {row['capture_seconds']:10.1f}"
        )
    print(f"written to {save('planning', rows)}")
