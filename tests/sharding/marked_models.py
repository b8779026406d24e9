"""Small models that tests mark, and how an error says where."""

from __future__ import annotations

import re

import torch
from torch import nn

from commfuse_fx.ir.core.mesh import Mesh

EIGHT = Mesh((8,), ("dp",))
TWO_FOUR = Mesh((2, 4), ("dp", "tp"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, hidden, scale=1.0):
        return hidden + self.down(torch.relu(self.up(input=hidden))) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 24)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


class Run(nn.Module):
    """A function as a module, with parameters."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(x, *self.parameters())


def x8():
    return torch.randn(8, 8)


def here(file, message):
    """A pattern: the message, behind a place in this test file."""
    return rf"{re.escape(file)}\.py:\d+: {re.escape(message)}"
