"""Ranks whose batches differ in size, for a step or for good: one plan of communication, and the mean over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Situation, Variant, Variants
from commfuse_fx.passes.rewrite.resend_rows import may_resend
from commfuse_fx.planning import compile_call
from tests import captures
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import OFF, assert_same
from tests.oracle import ACROSS, OPTIMAL, SLOW

pytestmark = pytest.mark.dist

Rows = Sequence[tuple[int, int]]
"""Of each step: how many rank 0 and rank 1 have."""

INDEX = {"allreduce": {"mode": "index", "config": [2, 4]}}
ONE_MIB = {"allreduce": {"mode": "size", "config": 1}}


def tower() -> nn.Module:
    """Large batches are computed channels last, with gradients of weights of their own, small ones as they are."""
    layers: list[nn.Module] = []
    for ins, outs in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(ins, outs, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


def images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 24, 24)


class Unseen(nn.Module):
    """A mask that is drawn and changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * F.dropout(x, 0.1, training=True)


def masked() -> nn.Module:
    """Large masks are drawn by another kernel than small ones."""
    return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), Unseen(), nn.Linear(1024, 64), nn.Linear(64, 5))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in ((16, 128), (128, 256), (256, 256), (256, 128), (128, 5))))


def vectors(rows: int) -> torch.Tensor:
    return torch.randn(rows, 16)


class Tied(nn.Module):
    """Classes are the words that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 256)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words).mean(1)))


def words(rows: int) -> torch.Tensor:
    return torch.randint(0, 30, (rows, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "tower": (tower, images),
    "masked": (masked, vectors),
    "layers": (layers, vectors),
    "tied": (Tied, words),
}


def train(kind: str, rows: Rows, options: dict[str, Any]) -> Any:
    """Parameters after these steps, and those of an eager loop that averages over ranks."""
    make, batch_of = MODELS[kind]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    captures.share(model, kind)
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, reference))
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=mine, **options)
    torch.manual_seed(1 + dist.get_rank())
    for each in rows:
        x, y = batch_of(each[dist.get_rank()]), torch.randint(0, 5, (each[dist.get_rank()],))
        loss = step(x, y)
        theirs.zero_grad()
        want = F.cross_entropy(reference(x), y)
        want.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, want.detach(), rtol=1e-3, atol=1e-4)
        for param in reference.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        theirs.step()
    step.synchronize()
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()), rtol=1e-3, atol=2e-4)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


SMALLER_LAST = ((8, 8), (8, 8), (8, 1), (8, 8))
FIRST = ((32, 31), (32, 31), (16, 32))

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "size": {"comm_fusion": ONE_MIB},
    "index": {"comm_fusion": INDEX},
    "off": {"comm_fusion": OFF},
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("tower", SMALLER_LAST), ("masked", ((32, 15), (32, 32), (15, 32))), ("masked", ((32, 32), (32, 15)))],
)
def test_compute_that_follows_the_batch_is_no_other_plan(ranks: Ranks, kind: str, rows: Rows, way: str) -> None:
    first, second = ranks.values(train, kind, rows, WAYS[way], size=2)
    assert_same(first, second)


ACROSS_SLOW: dict[str, Any] = {"comm_fusion": OPTIMAL, "cluster": SLOW, "schedule": ACROSS}
BY_COST: dict[str, dict[str, Any]] = {
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "default"},
    "optimal, slow": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across steps": ACROSS_SLOW,
    "across steps, 1 Gbit/s": {"schedule": ACROSS, "cluster": "gloo-1gbit"},
}


@pytest.mark.parametrize(
    ("kind", "rows", "way"),
    [
        *(("layers", FIRST, way) for way in BY_COST),
        *(("tower", SMALLER_LAST, way) for way in BY_COST),
        # Other batches of the first model, each within a step and across steps, and on each network once.
        ("layers", ((64, 64), (64, 64), (64, 5), (64, 64), (64, 5)), "optimal, slow"),
        ("layers", ((64, 64), (64, 64), (64, 5), (64, 64), (64, 5)), "across steps"),
        ("layers", ((512, 300), (300, 512)), "optimal"),
        ("layers", ((512, 300), (300, 512)), "across steps, 1 Gbit/s"),
    ],
)
def test_plans_by_cost_are_those_of_all_ranks(ranks: Ranks, kind: str, rows: Rows, way: str) -> None:
    first, second = ranks.values(train, kind, rows, BY_COST[way], size=2)
    assert_same(first, second)


def train_resending(rows: Rows, options: dict[str, Any]) -> Any:
    """As `train`, with the gradient of the embedding in two parts; also, how many plans of this kind were made."""
    made: list[bool] = []

    def variants(situation: Situation, program: Program) -> Variants:
        made.append(situation.same_batches and may_resend(program))
        return Variants((Variant.of(resent=made[-1]),))

    given, compile_call.variants = compile_call.variants, variants
    try:
        return train("tied", rows, options), made
    finally:
        compile_call.variants = given


@pytest.mark.parametrize("way", ["optimal", "across steps"])
def test_rows_are_sent_again_where_all_ranks_have_as_many(ranks: Ranks, way: str) -> None:
    (first, made), (second, _) = ranks.values(train_resending, ((16, 16),) * 4, BY_COST[way], size=2)
    assert_same(first, second)
    assert made == [True]


@pytest.mark.parametrize("rows", [((16, 16), (16, 16), (16, 5), (5, 16), (16, 16)), ((16, 9), (16, 16), (9, 16))])
@pytest.mark.parametrize("way", ["optimal", "across steps"])
def test_rows_are_not_sent_again_where_batches_differ(ranks: Ranks, rows: Rows, way: str) -> None:
    (first, made), (second, _) = ranks.values(train_resending, rows, BY_COST[way], size=2)
    assert_same(first, second)
    assert made[0] and not any(made[2:]) and len(made) > 2


def other_models() -> None:
    torch.manual_seed(0)
    model = layers() if dist.get_rank() == 0 else nn.Sequential(*layers(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, comm_fusion=OPTIMAL, cluster="default")
    step(vectors(8), torch.randint(0, 5, (8,)))


def test_other_models_are_no_matter_of_batches(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, other_models):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        assert "Give every rank the same model" in outcome.error


def replaced_on_one_rank() -> torch.Tensor:
    """Rank 1 takes up another module of the same kind, after the ranks have come to a plan in common."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers(), nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, **ACROSS_SLOW)
    rows = (1024, 2)[dist.get_rank()]
    for number in range(3):
        if number == 2 and dist.get_rank() == 1:
            model[-1] = nn.Identity()
        step(vectors(rows), torch.randint(0, 5, (rows,)))
        if number == 0:
            assert step.planner.has_common_plan
    step.synchronize()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_ranks_agree_again_where_one_has_forgotten(ranks: Ranks) -> None:
    first, second = run_soon(ranks, replaced_on_one_rank)
    assert not first.error and not second.error, first.details + second.details
    assert torch.equal(first.value, second.value)
