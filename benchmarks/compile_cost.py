"""What compiling costs: ever deeper GPT-2s and MLPs, traced once each, in every planning mode.

Rank 0 of a world of 8. "fusion + schedule" are the passes that decide and apply the communication plan. A mode's row is
one plan; "all plans" is what a compile in mode "optimal, across steps" spends: every plan that it makes and compares.
"simulate" is one simulation of the plan with its bound and its reasons, on the mode's cluster or gloo-1gbit.
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
from benchmarks.workloads import WORKLOADS, ManySmall, gpt2
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.presets import preset
from commfuse_fx.passes.declaration import Situation
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.pipeline.pipeline import PassRecord
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.simulate.simulation import simulate
from commfuse_fx.support.gc_pause import no_garbage_collection

OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
MODES: dict[str, dict[str, Any]] = {
    "unfused": {"comm_fusion": {"openstate": False}},
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
ALL_PLANS = "all plans"
PLANNING = (
    "gradients_first",
    "resend_rows",
    "postpone_gradients",
    "fuse_collectives",
    "flatten_storage",
    "tile_first_gradient",
    "split_updates",
    "lower_average",
    "schedule",
    "vote_first",
    "overlap",
    "stream_buckets",
)
WIDTH = 64
NODES_PER_LAYER = 20
"""Of the deep MLP, when its collectives stand in the graph: what the sizes of graphs below are stated in."""


class Passes:
    """A watcher that keeps what every pass of every plan did."""

    def __init__(self) -> None:
        self.records: list[PassRecord] = []

    def before(self, name: str, program: Program) -> None:
        pass

    def after(self, record: PassRecord, program: Program) -> None:
        self.records.append(record)

    def failed(self, name: str, error: Exception) -> None:
        pass

    @property
    def seconds(self) -> dict[str, float]:
        """By name of the pass."""
        found: dict[str, float] = {}
        for record in self.records:
            found[record.name] = found.get(record.name, 0.0) + record.seconds
        return found


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

    def plan(self, options: dict[str, Any], all_plans: bool = False) -> tuple[Program, Passes, float]:
        """All passes on a copy of the captured program; as in a compile, without garbage collection.

        Returns the plan, the passes of it or of `all_plans`, and the seconds of everything, copies included.
        """
        config = self._step(options).config
        program = replace(self.captured.copy(), config=config)
        passes = Passes()
        gc.collect()
        with no_garbage_collection():
            start = time.perf_counter()
            if all_plans:
                program, _, _ = plan_step(program, config, watcher=passes)
            else:
                build_pipeline(Situation(config, self.mesh)).run(program, watcher=passes)
            return program, passes, time.perf_counter() - start

    def _step(self, options: dict[str, Any]) -> CompiledStep:
        return cf.compile(
            self.model, loss_fn=self.loss_fn, optimizer=self.optimizer, device_num=8, global_rank=0, **options
        )


def measure(name: str, traced: Traced, results: dict[str, Any]) -> None:
    """Plan in every mode; one line and one entry of the results each. "all plans" are the fastest of 3 times."""
    limit = 0
    for mode in (*MODES, MEMORY_LIMIT, ALL_PLANS):
        if mode == ALL_PLANS:
            tries = [traced.plan(MODES["optimal, across steps"], all_plans=True) for _ in range(3)]
            program, run, passes = min(tries, key=lambda each: each[2])
        else:
            options = MODES.get(mode)
            if options is None:
                options = {**MODES["optimal gloo-1gbit"], "schedule": cf.ScheduleConfig(memory_limit=limit)}
            program, run, passes = traced.plan(options)
        if mode == "optimal gloo-1gbit":
            limit = peak_memory(program)
        seconds = run.seconds
        plans = sum(record.name == "reinplace" for record in run.records)
        planning = sum(seconds.get(each, 0.0) for each in PLANNING)
        slowest = max(seconds, key=seconds.__getitem__)
        captured = run.records[0].nodes_before
        nodes = max(record.nodes_before for record in run.records)
        total = traced.trace_seconds + passes
        start = time.perf_counter()
        simulate(program, CostModel(program.config.cluster or preset("gloo-1gbit")))
        simulating = time.perf_counter() - start
        results[f"{name}, {mode}"] = {
            "captured_nodes": captured,
            "nodes": nodes,
            "mode": mode,
            "plans": plans,
            "total_s": total,
            "trace_s": traced.trace_seconds,
            "passes_s": passes,
            "planning_s": planning,
            "simulate_s": simulating,
            "collectives": sum(1 for _ in program.collectives()),
            "by_pass": seconds,
        }
        print(
            f"{name:12} {captured:8} {nodes:8} {mode:22} {plans:5} {total:8.2f} {traced.trace_seconds:8.2f} "
            f"{passes:9.3f} {planning:18.3f} {simulating:11.3f}  {slowest} {seconds[slowest]:.3f}",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks compile_cost", description=__doc__)
    sizes = [150, 250, 400, 500, 1000, 2000, 5000]
    parser.add_argument("--layers", type=int, nargs="+", default=sizes, help="sizes of the deep MLP")
    parser.add_argument("--most-nodes", type=int, default=None, help="leave out deeper MLPs than this")
    parser.add_argument("--gpt2", type=int, nargs="+", default=[12, 24, 36, 48], help="layers of the GPT-2s")
    parser.add_argument("--no-gpt2", action="store_true", help="leave the GPT-2s out")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    print(
        f"{'model':12} {'captured':>8} {'nodes':>8} {'mode':22} {'plans':>5} {'total s':>8} {'trace s':>8} "
        f"{'passes s':>9} {'fusion+schedule s':>18} {'simulate s':>11}  slowest pass"
    )
    for layers in [] if options.no_gpt2 else options.gpt2:
        args, kwargs = WORKLOADS["gpt2"].batch(0)
        measure(f"gpt2 x{layers}", Traced(gpt2(layers), None, args, kwargs), results)
    for layers in options.layers:
        batch = (torch.ones(2, WIDTH), torch.zeros(2).long())
        if options.most_nodes is not None and layers * NODES_PER_LAYER > options.most_nodes:
            break
        traced = Traced(ManySmall(WIDTH, layers), WORKLOADS["many_small"].loss_fn, batch, {})
        measure(f"mlp x{layers}", traced, results)
        del traced
    print(f"written to {save('compile_cost', results)}")
