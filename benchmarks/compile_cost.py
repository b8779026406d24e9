"""What compiling costs: the 12-layer GPT-2 and ever deeper MLPs, traced once each, in every planning mode.

Rank 0 of a world of 8. "fusion + schedule" are the passes that decide and apply the communication plan.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.workloads import WORKLOADS, ManySmall
from commfuse_fx.compiler import build_pipeline
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.ir.program import Program
from commfuse_fx.pipeline import PassRecord
from commfuse_fx.step import CompiledStep

OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "optimal gloo-1gbit": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "optimal h100-ib-8": {"comm_fusion": OPTIMAL, "cluster": "h100-ib-8"},
    "optimal, across steps": {
        "comm_fusion": OPTIMAL,
        "cluster": "gloo-1gbit",
        "schedule": cf.ScheduleConfig(across_steps=True),
    },
    "1 MiB, across steps": {
        "comm_fusion": {"allreduce": {"mode": "size", "config": 1}},
        "cluster": "gloo-1gbit",
        "schedule": cf.ScheduleConfig(across_steps=True),
    },
}
MEMORY_LIMIT = "optimal, memory limit"
PLANNING = (
    "fuse_collectives",
    "flatten_storage",
    "split_updates",
    "lower_average",
    "schedule",
    "overlap",
    "stream_buckets",
)
WIDTH = 64
NODES_PER_LAYER = 20
"""Of the deep MLP, when its collectives stand in the graph: what the sizes of graphs below are stated in."""


class Traced:
    """One model, captured once, to plan in any mode."""

    def __init__(self, model: torch.nn.Module, loss_fn: Any, args: Any, kwargs: Any) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = torch.optim.AdamW(model.parameters())
        step = self._step({})
        start = time.perf_counter()
        captured = step.planner.read(step.planner.take_apart(args, kwargs)).captured
        assert captured is not None
        self.captured: Program = captured
        self.trace_seconds = time.perf_counter() - start
        self.mesh = step.mesh

    def plan(self, options: dict[str, Any]) -> tuple[Program, list[PassRecord]]:
        """All passes on a copy of the captured program; as in a compile, without garbage collection."""
        config = self._step(options).config
        program = replace(self.captured.copy(), config=config)
        pipeline = build_pipeline(config, self.mesh)
        gc.collect()
        gc.disable()
        try:
            return program, pipeline.run(program)
        finally:
            gc.enable()

    def _step(self, options: dict[str, Any]) -> CompiledStep:
        return cf.compile(
            self.model, loss_fn=self.loss_fn, optimizer=self.optimizer, device_num=8, global_rank=0, **options
        )


def measure(name: str, traced: Traced, results: dict[str, Any]) -> None:
    """Plan in every mode; one line and one entry of the results each."""
    limit = 0
    for mode in (*MODES, MEMORY_LIMIT):
        options = MODES.get(mode)
        if options is None:
            options = {**MODES["optimal gloo-1gbit"], "schedule": cf.ScheduleConfig(memory_limit=limit)}
        program, records = traced.plan(options)
        if mode == "optimal gloo-1gbit":
            limit = peak_memory(program)
        seconds: dict[str, float] = {}
        for record in records:
            seconds[record.name] = seconds.get(record.name, 0.0) + record.seconds
        passes = sum(seconds.values())
        planning = sum(seconds.get(each, 0.0) for each in PLANNING)
        slowest = max(seconds, key=seconds.__getitem__)
        nodes = max(record.nodes_before for record in records)
        total = traced.trace_seconds + passes
        results[f"{name}, {mode}"] = {
            "nodes": nodes,
            "mode": mode,
            "total_s": total,
            "trace_s": traced.trace_seconds,
            "passes_s": passes,
            "planning_s": planning,
            "collectives": sum(1 for _ in program.collectives()),
            "by_pass": seconds,
        }
        print(
            f"{name:12} {nodes:8} {mode:22} {total:8.2f} {traced.trace_seconds:8.2f} {passes:9.3f} {planning:18.3f}  "
            f"{slowest} {seconds[slowest]:.3f}",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks compile_cost", description=__doc__)
    sizes = [250, 500, 1000, 2000, 5000]
    parser.add_argument("--layers", type=int, nargs="+", default=sizes, help="sizes of the deep MLP")
    parser.add_argument("--most-nodes", type=int, default=None, help="leave out deeper MLPs than this")
    parser.add_argument("--no-gpt2", action="store_true", help="leave the GPT-2 out")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    print(
        f"{'model':12} {'nodes':>8} {'mode':22} {'total s':>8} {'trace s':>8} {'passes s':>9} "
        f"{'fusion+schedule s':>18}  slowest pass"
    )
    if not options.no_gpt2:
        gpt2 = WORKLOADS["gpt2"]
        args, kwargs = gpt2.batch(0)
        measure("gpt2 x12", Traced(gpt2.model(), gpt2.loss_fn, args, kwargs), results)
    for layers in options.layers:
        batch = (torch.ones(2, WIDTH), torch.zeros(2).long())
        if options.most_nodes is not None and layers * NODES_PER_LAYER > options.most_nodes:
            break
        traced = Traced(ManySmall(WIDTH, layers), WORKLOADS["many_small"].loss_fn, batch, {})
        measure(f"mlp x{layers}", traced, results)
        del traced
    print(f"written to {save('compile_cost', results)}")
