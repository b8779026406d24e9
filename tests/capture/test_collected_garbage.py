"""Python may collect garbage at any time, also while the values that a trace has read are looked at."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterator

import pytest
import torch
from torch import fx, nn

import commfuse_fx as cf
from commfuse_fx.capture.dynamo.graph_of_dynamo import GraphOfDynamo
from commfuse_fx.capture.guards.frozen import Frozen
from commfuse_fx.capture.guards.reads import Read


class Cyclic:
    """Freed by garbage collection only."""

    def __init__(self) -> None:
        self.itself, self.gain = self, 2.0


class MakesCycles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.held = Cyclic()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = Cyclic()
        return (x * self.weight * self.held.gain * getattr(made, "other", 3.0)).sum()


@pytest.fixture
def values_taken_before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Collects before each value but the first so many."""
    now, before = Read.now, request.param

    def collect_first(self: Read, own: Container[int]) -> Frozen:
        nonlocal before
        before -= 1
        if before < 0:
            gc.collect()
        return now(self, own)

    monkeypatch.setattr(Read, "now", collect_first)
    gc.collect()
    gc.freeze()  # or each collection looks through what all tests before have left
    gc.disable()
    yield request.param
    gc.enable()


@pytest.mark.usefixtures("values_taken_before")
@pytest.mark.parametrize("values_taken_before", [0, 6], indirect=True)
def test_what_only_a_trace_has_made_may_go(values_taken_before: int) -> None:
    step = cf.compile(MakesCycles(), form="step")
    for number in range(3):
        torch.testing.assert_close(step(torch.full((3,), float(number))), torch.tensor(18.0 * number))


def test_a_graph_of_dynamo_does_not_live_for_ever() -> None:
    graph = fx.symbolic_trace(lambda weight, x: weight * x)
    made = GraphOfDynamo(graph, [nn.Parameter(torch.ones(2)), torch.ones(2)], ["weight", None])
    assert made(torch.full((2,), 3.0)).tolist() == [3.0, 3.0]
    alive = weakref.ref(made)
    del made
    gc.collect()
    assert alive() is None
