"""The models that benchmarks train, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class MLP(nn.Module):
    """Residual blocks: 2.1 million parameters each at width 512."""

    def __init__(self, width: int = 512, blocks: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(width) for _ in range(blocks)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self, channels: int = 64, blocks: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(blocks):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class ManySmall(nn.Module):
    """Many small tensors: what fusion is for."""

    def __init__(self, width: int = 64, layers: int = 100) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def gpt2(layers: int = 12, width: int = 256) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=8, vocab_size=8192, n_positions=128, use_cache=False)
    )


@dataclass(frozen=True)
class Workload:
    """`model()` builds it; `batch(rank)` gives the step's positional and keyword arguments."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy


def _classes(*shape: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def batch(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(*shape, generator=generator)
        return (x, torch.randint(0, 10, (shape[0],), generator=generator)), {}

    return batch


def _tokens(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(0, 8192, (4, 128), generator=torch.Generator().manual_seed(rank))
    return (), {"input_ids": ids, "labels": ids}


WORKLOADS = {
    "mlp": Workload("mlp", MLP, _classes(64, 512)),
    "gpt2": Workload("gpt2", gpt2, _tokens, None),
    "convnet": Workload("convnet", ConvNet, _classes(8, 3, 32, 32)),
    "many_small": Workload("many_small", ManySmall, _classes(64, 64)),
}


def eager_loss(workload: Workload, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The loss as plain PyTorch computes it."""
    if workload.loss_fn is None:
        loss: torch.Tensor = model(*args, **kwargs).loss
        return loss
    return workload.loss_fn(model(*args[:-1], **kwargs), args[-1])
