"""Parts of random models that are made of layers as people use them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.tanh, F.gelu, torch.sigmoid, F.silu, F.relu)


class Dense(nn.Linear):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__(width, width, bias=rng.random() < 0.7)
        self.activation = rng.randrange(len(ACTIVATIONS))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](super().forward(x))

    def turn(self, rng: random.Random) -> None:
        self.activation = rng.randrange(len(ACTIVATIONS))


class Norm(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.norm = rng.choice(
            (
                lambda: nn.BatchNorm1d(width),
                lambda: nn.BatchNorm1d(width, momentum=None),
                lambda: nn.BatchNorm1d(width, affine=False),
                lambda: nn.LayerNorm(width),
                lambda: nn.GroupNorm(2, width),
                lambda: nn.RMSNorm(width),
            )
        )()

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def turn(self, rng: random.Random) -> None:
        self.norm.eps = rng.choice((1e-5, 1e-3, 0.1))
        if isinstance(self.norm, nn.BatchNorm1d) and self.norm.momentum is not None:
            self.norm.momentum = rng.choice((0.1, 0.5))


class Residual(nn.Module):
    """With dropout of all or nothing, which two programs cannot draw differently."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(rng.choice((0.0, 0.0, 1.0)))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(x))))

    def turn(self, rng: random.Random) -> None:
        self.dropout.p = 1.0 - self.dropout.p


class Lookup(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        options: dict[str, Any] = rng.choice(({}, {"padding_idx": 1}, {"scale_grad_by_freq": True}))
        self.table = nn.Embedding(7, width, **options)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.table(tokens))


class Recurrent(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.cell = rng.choice((nn.GRU, nn.RNN))(width, width, batch_first=True)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.cell(torch.stack((x, x * 0.5), 1))[0][:, -1]


class LongMemory(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.cell(torch.stack((x, x * 0.5), 1))[0][:, -1]


class Attend(nn.Module):
    """Every row attends to its own two halves."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.causal = rng.random() < 0.5
        self.qkv = nn.Linear(width // 2, 3 * (width // 2))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        halves = x.view(x.shape[0], 1, 2, -1)
        q, k, v = self.qkv(halves).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).flatten(1)

    def turn(self, rng: random.Random) -> None:
        self.causal = not self.causal


class MultiHead(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.stack((x, torch.tanh(x)), 1)
        return x + self.attention(rows, rows, rows, need_weights=False)[0][:, 0]


class Convolve(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        if rng.random() < 0.5:
            self.conv = self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(2) if rng.random() < 0.5 else nn.Identity()

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x.view(x.shape[0], 1, 2, -1)))).mean(1).flatten(1)


class Checkpointed(nn.Linear):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda rows: torch.tanh(F.linear(rows, self.weight, self.bias)), x, use_reentrant=False)


class Parametrized(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Mixed(nn.Bilinear):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__(width, 2, width)
        self.slope = nn.PReLU(width)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.slope(super().forward(x, x[:, :2]))


class PartlyFrozen(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.requires_grad_(False)
        self.unused = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


PLAIN_PARTS: dict[str, type[Any]] = {
    "dense": Dense,
    "norm": Norm,
    "residual": Residual,
    "lookup": Lookup,
    "recurrent": Recurrent,
    "lstm": LongMemory,
    "attend": Attend,
    "multihead": MultiHead,
    "convolve": Convolve,
    "checkpointed": Checkpointed,
    "parametrized": Parametrized,
    "mixed": Mixed,
    "partly_frozen": PartlyFrozen,
}
