"""A model whose parameters are hard to divide by rows."""

from __future__ import annotations

import torch
from torch import nn

from tests import captures


class OddRows(nn.Module):
    """Weights whose rows divide and others, a scalar, a tied weight, a frozen one and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(12, 24)
        self.odd = nn.Linear(24, 13)
        self.back = nn.Linear(13, 24)
        self.tied = nn.Linear(24, 13)
        self.tied.weight = self.odd.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 13))
        self.frozen = nn.Parameter(torch.randn(13), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.begin(x))

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(torch.tanh(self.into(x))) * self.scale + self.row

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.back(hidden))) + self.frozen


class WithSpare(OddRows):
    """The same in float64, with a layer that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(13, 13)
        self.double()
        captures.share(self, WithSpare, any_mesh=True)

    def forward(self, x: torch.Tensor, spares: bool = False) -> torch.Tensor:
        hidden = self.begin(x)
        return self.end(self.spare(hidden) if spares else hidden)
