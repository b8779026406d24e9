"""One process: what it brings to do work once that no step has to repeat, on GPT-2 and Llama from transformers.

Three passes do that: `compute_once`, `merge_equal` and `plain_masks`. Dropout is off, since attention kernels of the
CPU take no mask with it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measure import interleave, ratios, save
from benchmarks.without_passes import step_without
from benchmarks.workloads import Workload, tokens
from commfuse_fx.passes.rewrite.compute_once import ComputeOnce
from commfuse_fx.passes.rewrite.merge_equal import MergeEqual
from commfuse_fx.passes.rewrite.plain_masks import PlainMasks

OFF: dict[str, Sequence[type[Any]]] = {
    "none": (ComputeOnce, MergeEqual, PlainMasks),
    "merge_equal": (ComputeOnce, PlainMasks),
    "compute_once": (MergeEqual, PlainMasks),
    "plain_masks": (ComputeOnce, MergeEqual),
    "all": (),
}
"""Passes that run -> those that are left out."""


def gpt2(length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=8192, n_positions=length, use_cache=False)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama(length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=length,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks repeated_work", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each variant")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 1024], help="tokens of a sequence")
    parser.add_argument("--workloads", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    print(f"{'workload':8} {'tokens':>10} {'passes':14} {'ms':>8} {'/ none':>7} (quartiles)")
    for name in options.workloads:
        for length in options.lengths:
            rows = 1024 // length
            workload = Workload(name, partial(MODELS[name], length), tokens(rows, length), None)
            times = interleave({each: step_without(off, workload) for each, off in OFF.items()}, options.rounds)
            results[f"{name} {rows} x {length}"] = times
            for each in OFF:
                low, middle, high = ratios(times, each, "none")
                ms, shown = statistics.median(times[each]) * 1e3, f"{rows} x {length}"
                print(f"{name:8} {shown:>10} {each:14} {ms:8.1f} {middle:7.3f} ({low:.3f}-{high:.3f})", flush=True)
    print(f"written to {save('repeated_work', results)}")
