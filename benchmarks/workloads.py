"""The models that benchmarks train, with their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def gpt2(layers: int = 12, width: int = 256, heads: int = 8, words: int = 8192) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, n_positions=128, use_cache=False)
    )
    return model


def bert(layers: int = 8, width: int = 256) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: nn.Module = BertForMaskedLM(
        BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=4,
            intermediate_size=4 * width,
            vocab_size=8192,
            max_position_embeddings=128,
        )
    )
    return model


def llama(layers: int = 6, width: int = 256) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8192,
            max_position_embeddings=256,
            use_cache=False,
        )
    )
    return model


def _no_blocks(model: nn.Module) -> list[list[nn.Module]]:
    return []


class Recurrent(nn.Module):
    """Two layers of an LSTM over sequences of vectors; the last output is classified."""

    def __init__(self, features: int = 128, width: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(features, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


Batch = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments of a rank's step."""


@dataclass(frozen=True)
class Workload:
    """`model()` builds it; `batch(rank)` gives the step's positional and keyword arguments.

    `blocks(model)` lists the groups of modules that one who shards the parameters would shard as units.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy
    blocks: Callable[[Any], list[list[nn.Module]]] = _no_blocks


def classes(*shape: int) -> Batch:
    """A batch of vectors or images with numbers of ten classes."""

    def batch(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(*shape, generator=generator)
        return (x, torch.randint(0, 10, (shape[0],), generator=generator)), {}

    return batch


def tokens(*shape: int) -> Batch:
    """A batch of a language model that predicts its own input."""

    def batch(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(0, 8192, shape, generator=torch.Generator().manual_seed(rank))
        return (), {"input_ids": ids, "labels": ids}

    return batch


def _masked_tokens(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A masked language model's batch: 15% of the tokens are hidden behind token 4 and asked for."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(5, 8192, (4, 128), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return (), {"input_ids": ids.masked_fill(hidden, 4), "labels": ids.masked_fill(~hidden, -100)}


def _singly(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    return [[module] for module in modules]


def _in_groups(modules: Iterable[nn.Module], size: int) -> list[list[nn.Module]]:
    found = list(modules)
    return [found[begin : begin + size] for begin in range(0, len(found), size)]


WORKLOADS = {
    "mlp": Workload("mlp", MLP, classes(64, 512), blocks=lambda model: _singly(model.blocks)),
    "gpt2": Workload("gpt2", gpt2, tokens(4, 128), None, blocks=lambda model: _singly(model.transformer.h)),
    "bert": Workload("bert", bert, _masked_tokens, None, blocks=lambda model: _singly(model.bert.encoder.layer)),
    "convnet": Workload(
        "convnet",
        ConvNet,
        classes(8, 3, 32, 32),
        # Each convolution with its BatchNorm and ReLU.
        blocks=lambda model: _in_groups(list(model.features)[1:], 3),
    ),
    "many_small": Workload("many_small", ManySmall, classes(64, 64), blocks=lambda model: _in_groups(model.layers, 10)),
    "lstm": Workload("lstm", Recurrent, classes(32, 64, 128)),
}


LEARNING_RATE = 1e-6
"""Of the variants that `step_time` compares: low enough that no model learns its batch by heart while it is measured.

One that does drives probabilities into the denormal numbers, where a processor takes up to 20 times as long: its
log_softmax's backward alone then takes 93 instead of 5 ms. How long a step takes would depend on how many steps its
variant has had.
"""


def eager_loss(workload: Workload, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The loss as plain PyTorch computes it."""
    if workload.loss_fn is None:
        loss: torch.Tensor = model(*args, **kwargs).loss
        return loss
    return workload.loss_fn(model(*args[:-1], **kwargs), args[-1])
