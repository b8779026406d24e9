"""What `benchmarks gpu` trains, and the ways in which it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from benchmarks.plain_models import GPT2, Llama, NormedMLP, ResNet
from benchmarks.workloads import LEARNING_RATE

Step = Callable[[], Any]


@dataclass(frozen=True)
class GPUWorkload:
    """A model that returns its loss, with one batch that stays on the device.

    batch(device): the model's arguments. dtype: of the parameters. autocast: the dtype of autocast, or none.
    block: steps that are timed together.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    channels_last: bool = False
    block: int = 10

    def model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            model = self.build().to(self.dtype)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        return model

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)

    def arguments(self, device: torch.device) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return self.batch(device)


def _tokens(rows: int, length: int, vocabulary: int) -> Callable[[torch.device], dict[str, torch.Tensor]]:
    def batch(device: torch.device) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, vocabulary, (rows, length), device=device)
        return {"ids": ids, "labels": ids}

    return batch


def _images(rows: int, size: int) -> Callable[[torch.device], dict[str, torch.Tensor]]:
    def batch(device: torch.device) -> dict[str, torch.Tensor]:
        images = torch.randn(rows, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return {"images": images, "labels": torch.randint(0, 10, (rows,), device=device)}

    return batch


def _vectors(rows: int, width: int) -> Callable[[torch.device], dict[str, torch.Tensor]]:
    def batch(device: torch.device) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, width, device=device)
        return {"x": x, "labels": torch.randint(0, 10, (rows,), device=device)}

    return batch


BF16 = torch.bfloat16

LARGE = {
    "gpt2": GPUWorkload(GPT2, _tokens(8, 1024, 50257), autocast=BF16),
    "resnet50": GPUWorkload(ResNet, _images(64, 224), autocast=BF16, channels_last=True),
    "mlp": GPUWorkload(NormedMLP, _vectors(64, 256), block=20),
    "llama": GPUWorkload(Llama, _tokens(2, 2048, 32000), dtype=BF16, block=3),
}
"""GPT-2 of 124 M parameters, ResNet-50, 16 linear layers of width 256, and a Llama of 1.1 G parameters."""

SMALL = {
    "gpt2": GPUWorkload(lambda: GPT2(1, 32, 2, 64, 16), _tokens(2, 16, 64), autocast=BF16, block=2),
    "resnet50": GPUWorkload(lambda: ResNet((1, 1), 8, 10), _images(2, 32), autocast=BF16, channels_last=True, block=2),
    "mlp": GPUWorkload(lambda: NormedMLP(16, 2), _vectors(4, 16), block=2),
    "llama": GPUWorkload(lambda: Llama(1, 32, 4, 2, 64, 64, 16), _tokens(2, 16, 64), dtype=BF16, block=2),
}
"""The same models, as small as it goes: they show that the benchmark runs."""

EAGER, COMPILE, OVERHEAD = "eager", "torch.compile", "reduce-overhead"
PLAIN, INDUCTOR, GRAPH = "step", "step, inductor", "step, inductor + graph"


def make_step(variant: str, workload: GPUWorkload, device: torch.device) -> Step:
    """One training step with AdamW(fused=True). Raises what `cf.compile` raises for an option that it does not have."""
    model, given = workload.model(device), workload.arguments(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if variant in _OPTIONS:
        step = cf.compile(model, optimizer=optimizer, **_OPTIONS[variant])

        def compiled() -> None:
            with workload.precision(device):
                step(**given)

        return compiled
    call: Any = {
        EAGER: lambda: model,
        COMPILE: lambda: torch.compile(model),
        OVERHEAD: lambda: torch.compile(model, mode="reduce-overhead"),
    }[variant]()

    def run() -> None:
        optimizer.zero_grad()
        with workload.precision(device):
            loss = call(**given)
        loss.backward()
        optimizer.step()

    return run


_OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {"backend": "eager", "cuda_graph": False},
    INDUCTOR: {"backend": "inductor", "cuda_graph": False},
    GRAPH: {"backend": "inductor", "cuda_graph": True},
}
