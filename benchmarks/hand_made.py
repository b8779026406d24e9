"""Predicted step times of searched strategies, against the ready-made tensor and data parallel plans: a GPT-2 and a
Llama in bfloat16 on H100 presets. One process, no devices."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from benchmarks.measure import save
from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.presets import preset
from commfuse_fx.simulate.simulation import simulate

PRESETS = {8: "h100-node", 64: "h100-ib-8", 512: "h100-ib-64"}
TENSOR = (2, 4, 8)
"""Sizes of the tensor-parallel axis that a user would try: those of a node."""


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=1600, n_head=16, vocab_size=50304, use_cache=False)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def model_of(name: str, layers: int) -> Any:
    """In bfloat16. Nobody writes its parameters, so they take no memory."""
    with torch.device("meta"):
        model = MODELS[name](layers).bfloat16()
    model.to_empty(device="cpu").tie_weights()
    return model


def hand_made(
    model: Any, devices: int, tensor: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, int], cf.plans.Plan]]:
    """Name, mesh and plan of what a user would mark."""
    yield "data", (devices, 1), cf.plans.data_parallel(model)
    for ways in tensor:
        for extra in ({}, {"vocabulary": True}, {"vocabulary": True, "sequence": True}):
            name = "+".join((f"tensor {ways}", *extra))
            yield name, (devices // ways, ways), cf.plans.tensor_parallel(model, axis="tp", **extra)


def predicted(step: cf.Step, devices: int, rows: int, length: int) -> float:
    """Milliseconds of a step whose global batch has so many rows."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    compiled = step.planner.read(step.planner.take_apart((), {"input_ids": ids, "labels": ids}))
    seconds = simulate(compiled.program, CostModel(preset(PRESETS[devices]))).step_seconds
    gc.collect()
    return 1e3 * seconds


def measure(
    name: str, layers: int, devices: int, rows: int, length: int, tensor: tuple[int, ...] = TENSOR
) -> list[dict[str, Any]]:
    """The searched strategies first, then plans made by hand. rows: of the batch, for each device. tensor: sizes of the
    tensor-parallel axis."""
    model = model_of(name, layers)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "device_num": devices,
        "cluster": PRESETS[devices],
        "full_batch": True,
    }
    total, found = rows * devices, []
    which = {"model": name, "layers": layers, "devices": devices, "rows": rows, "length": length}
    step = cf.compile(model, parallel_mode="auto", **options)
    found.append(which | {"plan": "searched", "milliseconds": predicted(step, devices, total, length)})
    for plan, mesh, marks in hand_made(model, devices, tensor):
        again = model_of(name, layers)
        cf.shard(again, marks)
        adamw = torch.optim.AdamW(again.parameters())
        step = cf.compile(again, parallel_mode="semi_auto", mesh=mesh, **options | {"optimizer": adamw})
        found.append(which | {"plan": plan, "milliseconds": predicted(step, devices, total, length)})
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks hand_made", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--devices", type=int, nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of the batch, for each device")
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args(arguments)
    results = []
    print(
        "{:6} {:>7} {:>5} {:>12} {:>12} {:>7}  {}".format(
            "model", "devices", "rows", "searched ms", "by hand ms", "ratio", "best by hand"
        )
    )
    for name in options.models:
        for devices in options.devices:
            for rows in options.rows:
                found = measure(name, options.layers, devices, rows, options.length)
                results += found
                mine, *others = found
                best = min(others, key=lambda each: each["milliseconds"])
                print(
                    f"{name:6} {devices:7} {rows:5} {mine['milliseconds']:12.2f} {best['milliseconds']:12.2f} "
                    f"{mine['milliseconds'] / best['milliseconds']:7.3f}  {best['plan']}",
                    flush=True,
                )
    print(f"written to {save('hand_made', results)}")
