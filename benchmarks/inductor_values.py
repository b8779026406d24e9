"""One process: gradients of a module with backend="inductor" in float64, against those of eager PyTorch.

The difference is the largest one of any element of a gradient, over the largest element of all gradients: some, as of a
bias before batch norm, are zero but for rounding. Dropout is on: Inductor draws the masks of eager PyTorch when it is
told to (`torch._inductor.config.fallback_random`). `llama` computes its norms and rotations in float32 by itself.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch._inductor import config as inductor_config

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.workloads import (
    MLP,
    WORKLOADS,
    ConvNet,
    ManySmall,
    Recurrent,
    Workload,
    bert,
    classes,
    gpt2,
    llama,
    tokens,
)

GOALS = {"llama": 1e-6}
"""Goals of models that compute in float32 in between. Those of all others are 1e-10."""

MODELS = {
    "gpt2": Workload("gpt2", lambda: gpt2(2, 64), tokens(2, 32), None),
    "bert": Workload("bert", lambda: bert(2, 64), WORKLOADS["bert"].batch, None),
    "llama": Workload("llama", lambda: llama(2, 64), tokens(2, 32), None),
    "mlp": Workload("mlp", lambda: MLP(64, 3), classes(16, 64)),
    "convnet": Workload("convnet", lambda: ConvNet(16, 3), classes(4, 3, 16, 16)),
    "many_small": Workload("many_small", lambda: ManySmall(16, 20), classes(16, 16)),
    "lstm": Workload("lstm", lambda: Recurrent(16, 32), classes(4, 8, 16)),
}


def largest_difference(workload: Workload) -> float:
    torch.manual_seed(0)
    model = workload.model().double()
    twin = copy.deepcopy(model)
    want = _gradients(workload, model)
    found = _gradients(workload, cf.compile(twin, backend="inductor", cpu_kernels=False))
    assert found.keys() == want.keys()
    scale = max(float(grad.abs().max()) for grad in want.values())
    return max(float((found[name] - grad).abs().max()) for name, grad in want.items()) / scale


def _gradients(workload: Workload, model: Any) -> dict[str, torch.Tensor]:
    args, kwargs = workload.batch(0)
    args = tuple(each.double() if each.is_floating_point() else each for each in args)
    torch.manual_seed(1)
    loss_fn = workload.loss_fn
    loss = model(**kwargs).loss if loss_fn is None else loss_fn(model(*args[:-1]), args[-1])
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks inductor_values", description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args(arguments)
    results: dict[str, float] = {}
    missed = 0
    with inductor_config.patch(fallback_random=True):
        for name in options.workloads:
            results[name] = largest_difference(MODELS[name])
            missed += not results[name] <= GOALS.get(name, 1e-10)
            print(f"{name:12} {results[name]:.1e}", flush=True)
    print(f"written to {save('inductor_values', results)}")
    return int(missed > 0)
