"""Steps to compare, and canonical texts written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf

HEADER = ("# schema: 1", "# torch: 2.13.0", "# world: 2")


class Net(nn.Module):
    """Linear layers under a name of choice, with ReLUs between; `twice` says after which one there are two."""

    def __init__(self, layers: int = 4, name: str = "layers", twice: int = -1, width: int = 8) -> None:
        super().__init__()
        sizes = [8, *[width] * (layers - 1), 8]
        self.name, self.twice = name, twice
        self.add_module(name, nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(getattr(self, self.name)):
            x = torch.relu(layer(x))
            if i == self.twice:
                x = torch.relu(x)
        return x


def train(model: nn.Module, comm_fusion: Any = None, rank: int = 0, **options: Any) -> cf.Lowered:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mse = nn.functional.mse_loss
    options = {"device_num": 2, "global_rank": rank, **options}
    step = cf.compile(model, comm_fusion, loss_fn=mse, optimizer=optimizer, **options)
    return step.lower(torch.ones(4, 8), torch.ones(4, 8))


def evaluate(model: nn.Module) -> cf.Lowered:
    step = cf.compile(model.eval(), loss_fn=nn.functional.mse_loss, device_num=2)
    return step.lower(torch.ones(4, 8), torch.ones(4, 8))


def written(*lines: str, result: str, header: Sequence[str] = HEADER) -> str:
    """A text of these nodes, which returns `result`."""
    return "\n".join([*header, *lines, f"return [%{result}]", ""])


def chain(count: int, relu_after: int = -1) -> str:
    """`count` nodes of one module, one after the other; behind node `relu_after` there is one ReLU more."""
    lines, last = ["in  %x: f32[4,4] = input"], "x"
    ordinals: dict[str, int] = {}
    for i in range(count):
        for op in ("sin", "relu", "cos")[i % 3], *(("relu",) if i == relu_after else ()):
            ordinals[op] = ordinals.get(op, -1) + 1
            name = f"block/{op}.{ordinals[op]}"
            lines.append(f"fwd %{name}: f32[4,4] = aten.{op}(%{last})")
            last = name
    return written(*lines, result=last)
