"""Gloo ranks on loopback: tensor parallelism by PyTorch's parallelize_module and by a compiled step, with one plan.

The same plan dictionary goes to both. One core per rank; steps are interleaved in one run.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commfuse_fx as cf
from benchmarks.measure import interleave, ratios, save

BATCH, LENGTH, VOCABULARY = 4, 128, 8192


def llama(layers: int, width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def plan() -> dict[str, Any]:
    """Columns for what goes into heads and hidden units, rows for what comes out of them."""
    styles: dict[str, Any] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        styles[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{name}"] = RowwiseParallel()
    return styles


def batch() -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def parallelized_step(model: nn.Module, fused: bool) -> Callable[[], Any]:
    model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan())
    # A fused kernel takes tensors of one kind.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is divided] for divided in (True, False)]
    optimizers = [torch.optim.AdamW(params, fused=fused) for params in kinds]
    arguments = batch()

    def step() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: torch.Tensor = model(**arguments).loss
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return step


def compiled_step(model: nn.Module) -> Callable[[], Any]:
    cf.shard(model, plan())
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(model, optimizer=optimizer, parallel_mode="semi_auto", full_batch=True)
    arguments = batch()
    return lambda: step(**arguments)


def worker(rounds: int, layers: int, width: int, out: Path) -> None:
    cf.init()
    torch.manual_seed(0)
    model = llama(layers, width)
    steps = {
        "parallelize_module": parallelized_step(copy.deepcopy(model), fused=False),
        "parallelize_module fused": parallelized_step(copy.deepcopy(model), fused=True),
        "compiled": compiled_step(copy.deepcopy(model)),
    }

    def together(step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            dist.barrier()
            step()

        return run

    losses = {name: float(step().detach()) for name, step in steps.items()}
    times = interleave({name: together(step) for name, step in steps.items()}, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"times": times, "first_loss": losses}))
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks tensor_parallel", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.rounds, options.layers, options.width, Path(options.worker))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.ranks}", "-m", "benchmarks", "tensor_parallel"]
        command += ["--worker", str(out), "--rounds", str(options.rounds)]
        command += ["--layers", str(options.layers), "--width", str(options.width)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        measured = json.loads(out.read_text())
    times: dict[str, list[float]] = measured["times"]
    print(f"{'variant':26} {'ms':>8} {'/ parallelize_module':>21} {'first loss':>11}")
    results: dict[str, Any] = {}
    for name, values in times.items():
        row = {"ms": statistics.median(values) * 1e3, "ratio": ratios(times, name, "parallelize_module")[1]}
        results[name] = row
        print(f"{name:26} {row['ms']:8.1f} {row['ratio']:21.3f} {measured['first_loss'][name]:11.6f}")
    print(f"written to {save('tensor_parallel', results)}")
