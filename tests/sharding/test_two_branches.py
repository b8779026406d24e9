"""Branches that only the order of random draws connects: what is merged across them must keep that order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.order import nearest_above
from commfuse_fx.ir.core.random_draws import call_draws
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import Batch, Case
from tests.oracle import ACROSS, OPTIMAL, SLOW
from tests.sharding.divided_oracle import EXACT, compare, divided

aten = torch.ops.aten
Op = Callable[[torch.Tensor], torch.Tensor]


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op
        self.q, self.o, self.n, self.f = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.op(self.q(x)))
        return x + self.f(self.n(x))


class Towers(nn.Module):
    """Two of them, which meet at the end."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.e = nn.Sequential(Block(op), Block(op))
        self.d = nn.Sequential(Block(op), Block(op))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.e(x) * self.d(x.flip(1))).mean(1)
        return found


def batch(rows: int) -> Batch:
    return torch.randn(rows, 3, 8), torch.randint(8, (rows,))


@cache
def case_of(name: str, op: Op) -> Case:
    """The same one for the same op, so that all plans share its capture."""
    return Case(name, lambda: Towers(op), batch)


def vectors(model: nn.Module) -> None:
    """Vectors that are gathered for their use, in both towers."""
    for name in ("e.0.f.bias", "e.0.n.bias", "d.0.o.bias"):
        cf.shard(model.get_parameter(name), ("dp",))


def matrices(model: nn.Module) -> None:
    for name, layout in {"e.0.f": (None, "dp"), "e.0.q": ("dp", None), "d.0.o": ("dp", None)}.items():
        cf.shard(model.get_submodule(name).weight, layout)  # type: ignore[arg-type]


QUIET: dict[str, Op] = {
    "attention": attention,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, False)[0],
}
DRAWING: dict[str, Op] = {
    "multinomial": lambda x: x * torch.multinomial(torch.ones(8, dtype=x.dtype), 8).to(x.dtype),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
INDEX = {"allreduce": {"mode": "index", "config": [3, 9]}}
SIZE = {kind: {"mode": "size", "config": 1} for kind in ("allreduce", "allgather", "reducescatter")}
PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "size": {"comm_fusion": SIZE},
    "index": {"comm_fusion": INDEX},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": SLOW},
    "across": {"comm_fusion": OPTIMAL, "cluster": SLOW, "schedule": ACROSS},
    "apart": {"comm_fusion": {"openstate": False}},
    "unscheduled": {"schedule": "none"},
}


@pytest.mark.parametrize("mark", [vectors, matrices])
@pytest.mark.parametrize("kind", QUIET)
def test_branches_that_draw_nothing(kind: str, mark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")
    compare(case_of(kind, QUIET[kind]), (2,), mark, steps=1, gradients=False)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_attention_in_every_plan(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")
    compare(case_of("attention", attention), (2,), vectors, steps=1, gradients=False, **plan)


def numbered(model: nn.Module) -> None:
    """Fusion ids that ask for buckets across the towers."""
    vectors(model)
    for number, param in enumerate(model.parameters()):
        if number % 3 == 0:
            param.comm_fusion = 1 + number % 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", DRAWING)
def test_branches_that_draw_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused or not, a seed gives the same numbers in the same places."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")
    case = case_of(kind, DRAWING[kind])
    model, batches = case.model(), case.batches(2)
    losses: list[torch.Tensor] = []
    for mark, plan in ((vectors, "apart"), (vectors, "default"), (numbered, "default"), (vectors, "across")):
        torch.manual_seed(7)
        found = divided(case, model, (2,), mark, **PLANS[plan])
        losses.append(torch.stack([loss for batch in batches for loss in found.run(batch)]))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=EXACT, atol=EXACT)


def test_which_calls_draw() -> None:
    x = torch.ones(2, 2)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not call_draws(flash, (x, x, x), {})
    assert not call_draws(flash, (x, x, x, 0.0, True), {})
    assert call_draws(flash, (x, x, x, 0.1), {})
    assert call_draws(aten.native_dropout.default, (x, 0.5, True), {})
    assert call_draws(aten.native_dropout.default, (x, 0.5, None), {})
    assert not call_draws(aten.native_dropout.default, (x, 0.5, False), {})
    assert call_draws(aten.rrelu_with_noise.default, (x, x, 0.1, 0.3, True), {})
    assert not call_draws(aten.rrelu_with_noise.default, (x, x, 0.1, 0.3), {})
    assert not call_draws(aten.rrelu_with_noise.default, (x, x), {"training": False})
    assert call_draws(aten.bernoulli.p, (x, 0.0), {})
    assert not call_draws(aten.mul.Tensor, (x, x), {})


def test_a_step_that_draws_nothing_leaves_the_generator_alone() -> None:
    case = case_of("attention", attention)
    model, (batch,) = case.model(), case.batches(1)
    step = cf.compile(model, loss_fn=case.loss_fn, device_num=2, form="step")
    world = LockstepWorld(step)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    world([batch, batch])
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(executor.draws for executor in world._running.executors)  # type: ignore[union-attr]


def test_nearest_above_follows_every_edge() -> None:
    graph = torch.fx.Graph()
    a, b, c, d = (graph.placeholder(name) for name in "abcd")
    assert nearest_above({a: [], b: [a], c: [b], d: [c, a]}, [a, c, d]) == [[], [0], [0, 1]]
