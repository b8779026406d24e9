"""One GPU, one process: the module form and the step against eager PyTorch, in time and peak memory.

GPT-2 of 124 M parameters under bf16 autocast, 8 sequences of 1024 tokens, AdamW(fused=True). Each form runs in blocks
of ten steps, one after the other, eager first and last.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from benchmarks.measure import save

FORMS = ("eager", "module", "step", "eager")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False, **off)).cuda()
    return model


def one_step(form: str, ids: torch.Tensor) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    call: Any = {
        "eager": lambda: model,
        "module": lambda: cf.compile(model),
        "step": lambda: cf.compile(model, optimizer=optimizer),
    }[form]()

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(input_ids=ids, labels=ids)
        if form != "step":
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def measured(form: str, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    run = one_step(form, ids)
    for _ in range(3):
        run()
    torch.cuda.reset_peak_memory_stats()
    blocks = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        blocks.append((perf_counter() - began) / 10)
    return {"form": form, "ms": min(blocks) * 1e3, "peak_mib": torch.cuda.max_memory_allocated() / 2**20}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of ten steps (default 3)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; there is none here", file=sys.stderr)
        return 0
    ids = torch.randint(0, 50257, (8, 1024), device="cuda")
    rows = []
    for form in FORMS:
        rows.append(measured(form, ids, options.rounds))
        print(f"{form:8} {rows[-1]['ms']:8.2f} ms  peak {rows[-1]['peak_mib']:8.0f} MiB", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    save("gpu", {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    return 0
