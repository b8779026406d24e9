"""The same step twice, one of them captured, for the tests of captures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from tests.recorders import recorded

RATE = 2.0**-6  # float32 holds it, so a tensor of it is the same number


class Net(nn.Module):
    """Draws random numbers and writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))
        return out


def batch(number: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


Make = Callable[[nn.Module], torch.optim.Optimizer]


class Pair:
    """The same step twice: `step` is captured, `plain` is not."""

    def __init__(self, make: Make | None = adamw, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net() if model is None else model
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = (None, None) if make is None else (make(self.model), make(self.twin))
        shared = {"loss_fn": F.cross_entropy, **options}
        always = shared.pop("always", False)
        self.step = cf.compile(self.model, optimizer=self.optimizer, **shared)
        self.plain = cf.compile(self.twin, optimizer=self.other, **shared, cuda_graph=False)
        self.recorder = recorded(self.step)
        assert self.step.session.graphs is not None
        self.graphs = self.step.session.graphs
        self.graphs._always = always

    def run(self, number: int, rows: int = 8) -> torch.Tensor:
        """One step of both on the same batch and with the same random numbers, which must do the same."""
        given, state = batch(number, rows), torch.get_rng_state()
        want = self.plain(*given)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        got: torch.Tensor = self.step(*given)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(got, want)
        for (name, mine), (_, theirs) in zip(values(self.model), values(self.twin), strict=True):
            assert torch.equal(mine, theirs), name
        return got

    def captured(self) -> Pair:
        """This pair when its first shape has been captured and has run once."""
        for number in range(FIRST + 1):
            self.run(number)
        assert self.recorder.replays == [1]
        return self


def values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict().items()
    yield from ((name, param.grad) for name, param in model.named_parameters() if param.grad is not None)
