"""The models that plans are made for: large enough that their communication counts, and never run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import ManySmall

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class EqualLayers(nn.Module):
    """Linear layers of one size, 4 MiB of weights each at width 1024."""

    def __init__(self, width: int = 1024, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., "Deep residual learning for image recognition", 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of basic blocks; with the defaults as many parameters as ResNet-18, 11 million."""

    def __init__(self, width: int = 64, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inside = width
        for stage in range(4):
            outside = width * 2**stage
            for block in range(blocks):
                stages.append(BasicBlock(inside, outside, 2 if stage and not block else 1))
                inside = outside
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        return self.head(self.blocks(x).mean((2, 3)))


def gpt2_small() -> nn.Module:
    """GPT-2 small: 12 layers, width 768, vocabulary 50257. Its weights are not initialised."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


@dataclass(frozen=True)
class PlanWorkload:
    """`model()` builds it; `batch()` gives the arguments of a step, which are examples of shape and dtype only."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy


def _classes(*shape: int) -> Callable[[], Batch]:
    return lambda: ((torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)), {})


def _tokens() -> Batch:
    ids = torch.zeros(1, 1024, dtype=torch.long)
    return (), {"input_ids": ids, "labels": ids}


PLAN_WORKLOADS = {
    "mlp": PlanWorkload("mlp", EqualLayers, _classes(256, 1024)),
    "gpt2": PlanWorkload("gpt2", gpt2_small, _tokens, None),
    "resnet": PlanWorkload("resnet", ResNet, _classes(8, 3, 64, 64)),
    "many_small": PlanWorkload("many_small", lambda: ManySmall(64, 199), _classes(64, 64)),
}
