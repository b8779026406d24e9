"""Small steps put together at random, as the search meets them, and brute force for their cheapest choices."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.sharding.search import searched

Op = Callable[[torch.Tensor, "RandomNet"], torch.Tensor]

OPS: tuple[Op, ...] = (
    lambda x, net: net.first(x),
    lambda x, net: net.second(x),
    lambda x, net: x @ net.second.weight,
    lambda x, net: torch.relu(x),
    lambda x, net: x + net.start,
    lambda x, net: torch.softmax(x, -1),
    lambda x, net: x * net.scale,
    lambda x, net: F.layer_norm(x, net.scale.shape, net.scale),
    lambda x, net: x.t().contiguous().t(),
    lambda x, net: x - x.mean(0, keepdim=True),
)


class RandomNet(nn.Module):
    """Some of `OPS` one after the other. Weights are used as often as it happens."""

    def __init__(self, numbers: random.Random, count: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.ops = [OPS[0], *numbers.choices(OPS, k=count - 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = x
        for op in self.ops:
            x = op(x, self)
        del self.start
        return x


def weighted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum()


@cache
def random_step(seed: int, count: int, mesh: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """A step of so many ops before it is divided, and the mesh axes as a search is given them. Nobody changes them."""
    numbers = random.Random(seed)
    rows, width = numbers.choice((8, 64, 4096)), numbers.choice((16, 256, 1024))
    x = torch.empty(rows, width)
    return caught(RandomNet(numbers, count, width), weighted, x, x, mesh)


class SearchBegins(Exception):
    """In place of a search: the program, and the mesh axes."""


def caught(
    model: nn.Module, loss_fn: Any, x: torch.Tensor, y: torch.Tensor, mesh: tuple[int, ...]
) -> tuple[Any, list[Any]]:
    """A step before it is divided, and the mesh axes as a search is given them."""

    def begin(program: Any, axes: list[Any], *rest: Any) -> None:
        raise SearchBegins(program.copy(), axes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searched, "searched", begin)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"parallel_mode": "auto", "search_mode": "recursive_programming"}
        step = cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, mesh=mesh, device_num=prod(mesh), **options)
        with pytest.raises(SearchBegins) as found:
            step.lower(x, y)
    return found.value.args


def none_is_cheaper(graph: Any, cost: float) -> bool:
    """Whether no choice in a factor graph costs less, by looking at all that may."""
    count = len(graph.unary)
    after: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
    rest = [0.0] * (count + 1)
    for (one, other), table in graph.pairs.items():
        first, last = sorted((one, other))
        after[first].append((last, table if one == first else table.T))
        rest[first] += float(np.min(table))
    for number in reversed(range(count)):  # what pairs of later variables cost at least
        rest[number] += rest[number + 1]
    states = [0] * count

    def look(number: int, before: float, costs: list[Any], least: list[float]) -> bool:
        """costs, least: of the states of each variable, with its pairs with those chosen; the least of these."""
        if before + rest[number] + sum(least[number:]) >= cost * (1 - 1e-9):
            return True
        if number == count:
            return bool(graph.cost(states) >= cost * (1 - 1e-9))
        for state in np.argsort(costs[number], kind="stable").tolist():
            states[number] = state
            then, less = list(costs), list(least)
            for last, table in after[number]:
                then[last] = then[last] + table[state]
                less[last] = float(then[last].min())
            if not look(number + 1, before + float(costs[number][state]), then, less):
                return False
        return True

    return look(0, 0.0, list(graph.unary), [float(each.min()) for each in graph.unary])
