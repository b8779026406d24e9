"""Models that Dynamo cannot take as one graph."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.loops_of_modules import Net


class Block(nn.Module):
    """What it computes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.linear(x))
        if h.sum() > 1e-3:
            h = torch.tanh(h)
        return self.dropout(h)


class Breaks(Net):
    """Graph breaks in two blocks of the same code, a part that stays with Python, and a weight in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()]).double()
        self.python = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = super().forward(x) + self.by_python(x)
        return out @ self.blocks[0].linear.weight.t()

    @torch._dynamo.disable
    def by_python(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.python(x)
        return out


class Reentrant(Breaks):
    """A backward of its own runs inside of the backward."""

    @torch._dynamo.disable
    def by_python(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.python, x, use_reentrant=True)
        return out


class Counts(nn.Module):
    """A buffer that only Python changes, and no parameter that only Python reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count(x)
        out: torch.Tensor = self.linear(x) * self.seen[0]
        return out

    @torch._dynamo.disable
    def count(self, x: torch.Tensor) -> None:
        self.seen += x.detach().sum().abs()


class Routes(nn.Module):
    """A value of the input says which part it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]).double()
        self.last = nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.parts[int(x[0, 0])](x)
        if h.sum() > 1e9:
            h = h * 2
        out: torch.Tensor = self.last(h)
        return out
