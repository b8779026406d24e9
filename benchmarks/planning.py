"""What planning a step takes after its capture: a GPT-2 with a tensor-parallel plan, by layers and by devices, and a
GPT-2 XL whose ranks share the update. One process, no devices."""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.workloads import gpt2

TENSOR = 8
DIVIDING = ("range_lookups", "counter_random", "divide", "lower_redistributions")
SHARING: dict[str, dict[str, object] | None] = {
    "data parallel": None,
    "level 1": {"level": 1, "pad": True},
    "level 3": {"level": 3, "pad": True},
    "owners": {"mode": "broadcast"},
}
ACROSS = cf.ScheduleConfig(across_steps=True)
OPTIMAL = {kind: {"mode": "optimal", "config": None} for kind in ("allreduce", "reducescatter", "allgather")}
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "priced": {"cluster": "h100-ib-64"},
    "across steps": {"cluster": "h100-ib-64", "schedule": ACROSS},
    "optimal": {"cluster": "h100-ib-64", "comm_fusion": OPTIMAL},
}


def measure(step: cf.Step, ids: torch.Tensor, **which: object) -> dict[str, Any]:
    """Seconds of capture, of the passes that divide, and of all that comes after capture. which: names the row."""
    call = step.planner.take_apart((), {"input_ids": ids, "labels": ids})
    gc.collect()  # what the row before has left
    start = time.perf_counter()
    compiled = step.planner.read(call)
    total = time.perf_counter() - start
    return which | {
        "nodes": len(compiled.program.graph.nodes),
        "collectives": len(list(compiled.program.collectives())),
        "dividing_seconds": sum(each.seconds for each in compiled.records if each.name in DIVIDING),
        "planning_seconds": total - compiled.capture_seconds,
        "capture_seconds": compiled.capture_seconds,
    }


def divided(layers: int, devices: int) -> dict[str, Any]:
    """A GPT-2 of width 64 that a tensor-parallel plan divides."""
    torch.manual_seed(0)
    model = gpt2(layers, 64)
    cf.shard(model, cf.plans.tensor_parallel(model, axis="tp"))
    step = cf.compile(
        model,
        optimizer=torch.optim.AdamW(model.parameters()),
        parallel_mode="semi_auto",
        mesh=(devices // TENSOR, TENSOR),
        device_num=devices,
        full_batch=True,
    )
    ids = torch.randint(0, 64, (devices // TENSOR, 16))
    return measure(step, ids, what="tensor parallel", plan="default", layers=layers, devices=devices)


def shared(model: Any, devices: int, sharing: str, plan: str) -> dict[str, Any]:
    """A GPT-2 in data parallel. sharing, plan: names in SHARING and PLANS."""
    options = dict(PLANS[plan])
    if SHARING[sharing] is not None:
        options |= {"enable_parallel_optimizer": True, "parallel_optimizer_config": SHARING[sharing]}
    step = cf.compile(model, optimizer=torch.optim.AdamW(model.parameters()), device_num=devices, **options)
    layers, ids = model.config.n_layer, torch.zeros(1, 64, dtype=torch.int64)
    return measure(step, ids, what=sharing, plan=plan, layers=layers, devices=devices)


def xl(layers: int) -> Any:
    """A GPT-2 XL of so many layers. Nobody writes its parameters, so they take no memory."""
    with torch.device("meta"):
        model: Any = gpt2(layers, 1600, heads=25, words=50257)
    model.to_empty(device="cpu").tie_weights()
    return model


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks planning", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96], help="of the GPT-2 that a plan divides")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512, 4096], help="multiples of 8")
    parser.add_argument("--xl-layers", type=int, default=48, help="of the GPT-2 XL")
    parser.add_argument("--xl-devices", type=int, default=512)
    options = parser.parse_args(arguments)
    divided(1, TENSOR)  # imports and caches of torch
    shared(xl(1), TENSOR, "level 3", "optimal")
    rows = [divided(options.layers[0], devices) for devices in options.devices]
    rows += [divided(layers, options.devices[0]) for layers in options.layers[1:]]
    model = xl(options.xl_layers)
    rows += [shared(model, options.xl_devices, sharing, plan) for sharing in SHARING for plan in PLANS]
    head = ("step", "plan", "layers", "devices", "nodes", "collectives", "divide s", "after capture s", "capture s")
    print("{:16} {:13} {:>6} {:>8} {:>7} {:>12} {:>9} {:>16} {:>10}".format(*head))
    for row in rows:
        print(
            f"{row['what']:16} {row['plan']:13} {row['layers']:6} {row['devices']:8} {row['nodes']:7} "
            f"{row['collectives']:12} {row['dividing_seconds']:9.2f} {row['planning_seconds']:16.2f} "
            f"{row['capture_seconds']:10.1f}"
        )
    print(f"written to {save('planning', rows)}")
