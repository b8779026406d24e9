"""Parts of random models whose parameters and buffers are views, shared, mutated or otherwise odd."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) / columns**0.5


class ColumnMajor(nn.Module):
    """Its weight is dense, but lies column by column."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight(width, width).t().contiguous().t())

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Chunk(nn.Module):
    """Its weight is a view with gaps; what lies in the gaps is a buffer that nobody changes."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        base = _weight(width, 2 * width)
        weight, rest = rng.choice((base.chunk(2, 1), (base[:, ::2], base[:, 1::2])))
        self.weight = nn.Parameter(weight)
        self.register_buffer("rest", rest)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + self.rest[0].detach()


class Neighbours(nn.Module):
    """Two weights and a buffer lie one after the other in one storage."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        size = width * width
        base = _weight(3, size)
        self.weight = nn.Parameter(base[0].view(width, width))
        self.register_buffer("between", base[1].view(width, width))
        self.second = nn.Parameter(base[2].view(width, width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.between[0]) @ self.second


class Views(nn.Module):
    """Uses its weight through views: rows, transposed, flat, expanded, joined."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight(width, width))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.uses = [rng.randrange(5) for _ in range(2)]

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for use in self.uses:
            if use == 0:
                x = x @ self.weight.t()
            elif use == 1:
                x = x + self.weight[::2].sum(0) + self.weight.view(-1)[: x.shape[1]]
            elif use == 2:
                x = x * self.scale.expand(x.shape[1])
            elif use == 3:
                x = F.linear(x, torch.cat((self.weight[1:], self.weight[:1])))
            else:
                x = x + self.weight.unfold(0, 2, 1).mean((0, 2)) + self.weight[tokens % x.shape[1]]
        return torch.tanh(x)

    def turn(self, rng: random.Random) -> None:
        self.uses[0] = rng.randrange(5)


class Clipped(nn.Module):
    """Changes its weight before using it."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight(width, width))
        self.bound = rng.choice((0.1, 0.3, 0.5))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-self.bound, self.bound)
        return torch.tanh(x @ self.weight)

    def turn(self, rng: random.Random) -> None:
        self.bound = rng.choice((0.1, 0.3, 0.5))


class Teacher(nn.Module):
    """A slow copy of the weight, a buffer or a parameter that no optimizer trains, follows it."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight(width, width))
        if rng.random() < 0.5:
            self.slow = nn.Parameter(_weight(width, width), requires_grad=False)
        else:
            self.register_buffer("slow", _weight(width, width))
        self.decay = 0.9

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.mul_(self.decay).add_(self.weight, alpha=1 - self.decay)
        return torch.tanh(x @ self.weight) + 0.1 * (x @ self.slow.detach())

    def turn(self, rng: random.Random) -> None:
        self.decay = rng.choice((0.5, 0.9))


class Statistics(nn.Module):
    """Buffers of several dtypes, changed in place and replaced."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(width, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("hidden", torch.ones(2, width), persistent=False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.seen |= x.detach().abs().amax(0) > 0.5
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.hidden[tokens[:1] % 2] += 0.01
        return x - 0.1 * self.mean + self.hidden[1]


@dataclass
class Options:
    gain: float = 1.0


class Attributes(nn.Module):
    """Plain attributes of many kinds decide what it computes."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.scale = 0.8
        self.enabled = True
        self.sizes = [1, 2]
        self.named = {"shift": 0.1}
        self.options = Options()
        self.power = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.enabled:
            x = x * self.scale
        x = x + self.named["shift"] * self.sizes[0]
        return x * self.options.gain * self.power

    def turn(self, rng: random.Random) -> None:
        which = rng.randrange(5)
        if which == 0:
            self.scale = rng.choice((0.5, 0.8, 1.2))
        elif which == 1:
            self.enabled = not self.enabled
        elif which == 2:
            self.sizes[0] += 1
        elif which == 3:
            self.named["shift"] += 0.1
        else:
            self.options.gain *= 1.1


class OddDtypes(nn.Module):
    """Parameters of other dtypes than the model's."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(width, dtype=torch.float32))
        self.high = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.register_buffer("table", torch.arange(width, dtype=torch.int32))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.low.to(x.dtype) + (self.high * self.table).to(x.dtype) * 0.1)


class OddShapes(nn.Module):
    """A scalar, an empty tensor, one that nothing uses, one value per rank of a small world, and shared gradients."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.9))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.unused = nn.Parameter(torch.randn(3))
        self.heads = nn.Parameter(torch.randn(2))
        self.left, self.right = nn.Parameter(torch.randn(1, width)), nn.Parameter(torch.randn(1, width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = (x.view(x.shape[0], 2, -1) * self.heads[:, None]).flatten(1)
        return torch.tanh(x * self.scalar + self.nothing.sum(0) + (self.left + self.right))


class InPlace(nn.Module):
    """Changes activations in place, and writes rows."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.row = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).clone()
        x[0] = self.row
        x[:, 0] += 0.1
        return F.relu_(x.mul_(0.5)) + torch.where(tokens[:, None] > 2, x, -x)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.rate, None


class CustomBackward(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(2)])
        self.rate = 0.5

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = _Reversed.apply(x * self.weights[0], self.rate)
        rounded = x + (torch.round(x * 4) / 4 - x).detach() * 0.0
        return torch.tanh(rounded + self.weights[1])

    def turn(self, rng: random.Random) -> None:
        self.rate = rng.choice((-0.5, 0.5, 0.25))


class Spectral(nn.Module):
    """A weight divided by a norm that buffers follow from call to call."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class LimitedLookup(nn.Module):
    """An embedding that shortens its long rows in place as they are looked up."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width, max_norm=0.8)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.table(tokens))


class Decides(nn.Module):
    """Numbers of half precision next to jumps of comparisons, casts and roundings say which rows it trains, and how."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(24, width), nn.Parameter(torch.ones(width))
        self.dtype = rng.choice((torch.bfloat16, torch.float16))
        self.factors = rng.choice(((0.1, 10.0), (0.3, 10.0), (0.7, 1 / 0.7), (1 / 3, 3.0), (1 / 7, 7.0)))
        self.shift, self.bound = rng.choice((0.3, 0.7)), float(rng.randrange(1, 8))
        self.uses = rng.sample(range(len(_DECISIONS)), 3)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        s = (tokens + 1).to(self.dtype) * self.factors[0] * self.factors[1]
        x = torch.tanh(x + self.table((s * 2 + self.shift).to(torch.int64) // 2 % 24))
        for use in self.uses:
            decided = _DECISIONS[use](s + self.shift - self.shift, self.bound)
            x = x + decided.to(x.dtype)[:, None] * self.weight * 0.01
        return x

    def turn(self, rng: random.Random) -> None:
        self.bound = float(rng.randrange(1, 8))


_DECISIONS: tuple[Callable[[torch.Tensor, float], torch.Tensor], ...] = (
    lambda s, bound: s >= bound,
    lambda s, bound: s <= bound,
    lambda s, bound: s == bound,
    lambda s, bound: s.floor(),
    lambda s, bound: s.float().ceil(),
    lambda s, bound: s.to(torch.int64),
    lambda s, bound: torch.sign(s - bound),
    lambda s, bound: F.threshold(s, bound, 0.0),
    lambda s, bound: torch.clamp(s, 2.0, bound + 2.0),
    lambda s, bound: torch.remainder(s, 1.0) >= 0.5,
    lambda s, bound: torch.isclose(s, torch.full_like(s, bound), rtol=1e-3),
    lambda s, bound: torch.bucketize(s, torch.arange(1.0, 9.0).to(s.dtype)),
)


STRANGE_PARTS: dict[str, type[Any]] = {
    "column_major": ColumnMajor,
    "chunk": Chunk,
    "neighbours": Neighbours,
    "views": Views,
    "clipped": Clipped,
    "teacher": Teacher,
    "statistics": Statistics,
    "attributes": Attributes,
    "odd_dtypes": OddDtypes,
    "odd_shapes": OddShapes,
    "in_place": InPlace,
    "custom_backward": CustomBackward,
    "spectral": Spectral,
    "limited_lookup": LimitedLookup,
    "decides": Decides,
}
