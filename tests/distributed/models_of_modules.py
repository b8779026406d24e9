"""Models of several kinds that all take rows of six numbers, so that one training loop serves them all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class OfIds(nn.Module):
    """A Hugging Face model over ids that follow from the rows; returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.mul(100).long().abs() % 32
        out: torch.Tensor = self.inner(input_ids=ids).logits
        return out


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return OfIds(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8,
    )  # fmt: skip
    return OfIds(BertForMaskedLM(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=8,
    )  # fmt: skip
    return OfIds(LlamaForCausalLM(config))


class Experts(nn.Module):
    """A mixture of experts: all are computed, and a soft choice of two weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Twice(nn.Module):
    """One encoder called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x) * self.encoder(x.flip(0))
        return out


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 6),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convnet": convnet,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "experts": Experts,
    "twice": Twice,
}
