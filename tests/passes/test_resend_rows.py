"""The gradient of what is also looked up: sent early, and the rows that were looked up once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.inspect.diff.load import load
from commfuse_fx.ir.core.collectives import wait_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.rows import put_rows_
from commfuse_fx.passes.declaration import Pass, Situation, Variant, Variants
from commfuse_fx.passes.rewrite.resend_rows import ResendRows, may_resend
from commfuse_fx.planning import compile_call
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import Batch, Case, randomised, shards
from tests.oracle import (
    ACROSS,
    OPTIMAL,
    SLOW,
    MakeOptimizer,
    assert_same,
    by_class,
    cluster,
    make_world,
    sgd,
    train_reference,
    train_world,
)

WORDS, MOST, WIDTH = 128, 9, 32  # the batches use only a few words, so that ranks share some and repeat others


class Tied(nn.Module):
    """A language model whose input and output embeddings are one parameter. Word 0 is padding."""

    def __init__(self, padding: int | None = 0, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.layers = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(tokens))).flatten(0, 1)


class LookedUpTwice(Tied):
    """A second lookup, with numbers of its own, in the middle."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.words(tokens)) + self.words(tokens.flip(1).int())
        return self.head(self.layers(x)).flatten(0, 1)


class LookedUpLast(nn.Module):
    """The lookups' part is there before the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given = F.one_hot(tokens, WORDS).to(self.words.weight.dtype) @ self.words.weight
        return self.head(self.layers(given) * self.words(tokens.flip(1))).flatten(0, 1)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Tied(), Tied(None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.one(tokens) + self.other(tokens.flip(1))


def batch(rows: int) -> Batch:
    return torch.randint(MOST, (rows, 3)), torch.randint(WORDS, (rows, 3))


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, labels.flatten())


TIED = Case("tied", Tied, batch, loss)
CASES = [TIED, Case("twice", LookedUpTwice, batch, loss), Case("two-tables", TwoTables, batch, loss)]
WITHIN: dict[str, Any] = {"cluster": SLOW}
OPTIONS = {"within": WITHIN, "across": {"cluster": SLOW, "schedule": ACROSS}}
each_schedule = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def only(monkeypatch: pytest.MonkeyPatch, resent: bool = True, postponed: float = 0.0) -> None:
    """Let a compile make this plan, and no other."""

    def variants(situation: Situation, program: Program) -> Variants:
        assert may_resend(program)
        return Variants((Variant.of(postponed=postponed, resent=resent),))

    monkeypatch.setattr(compile_call, "variants", variants)


def puts(world: LockstepWorld) -> int:
    (plan,) = world.step.planner.plans.values()
    return sum(node.target is put_rows_ for node in plan.compiled.program.graph.nodes)


@each_schedule
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_are_those_of_one_device(
    case: Case, world: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, postponed=0.5)
    model, batches = case.model(), case.batches(4)
    want = train_reference(case, model, batches, world, sgd)
    ranks = make_world(case, model, world, sgd, OPTIMAL, **options)
    assert_same(train_world(ranks, batches), want)
    assert puts(ranks) == (2 if case.name == "two-tables" else 1)


@pytest.mark.parametrize(
    "optimizer",
    [
        by_class(torch.optim.AdamW, lr=1e-2, eps=1e-3),
        by_class(torch.optim.Adagrad, lr=1e-2),
        by_class(torch.optim.RMSprop, lr=1e-2, eps=1e-3),  # which divides sums by the number of ranks before it
    ],
    ids=["adamw", "adagrad", "rmsprop"],
)
@each_schedule
def test_optimizers(optimizer: MakeOptimizer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    model, batches = TIED.model(), TIED.batches(3)
    want = train_reference(TIED, model, batches, 2, optimizer)
    assert_same(train_world(make_world(TIED, model, 2, optimizer, OPTIMAL, **options), batches), want)


@each_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("fp32", [True, False], ids=["sum-in-f32", "as-it-is"])
def test_two_ranks_have_the_same_bits_as_without(
    dtype: torch.dtype, fp32: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = TIED.batches(4, dtype=dtype)
    trained: list[list[torch.Tensor]] = []
    for resent in (False, True):
        only(monkeypatch, resent)
        ranks = make_world(TIED, TIED.model(dtype), 2, sgd, OPTIMAL, gradient_fp32_sync=fp32, **options)
        models = train_world(ranks, batches)
        trained.append([param.detach().clone() for model in models for param in model.parameters()])
        assert puts(ranks) == resent
    assert all(torch.equal(mine, other) for mine, other in zip(*trained, strict=True))


@each_schedule
def test_every_collective_matters(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    batches = TIED.batches(3)

    def train(*drop: str) -> list[nn.Module]:
        ranks = make_world(TIED, TIED.model(), 2, sgd, OPTIMAL, **options)
        for number, each in enumerate(batches):
            ranks(shards(each, 2), drop=drop if number == 1 else ())
        names.extend(ranks.collectives(shards(batches[0], 2)[0]))
        return ranks.models

    names: list[str] = []
    want = train()
    found = list(names)
    assert any("numbers" in name for name in found) and len(found) >= 3
    for name in found:
        with pytest.raises(AssertionError):
            assert_same(train(name), want)


def lower(model: nn.Module, *args: Any, **options: Any) -> cf.Lowered:
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    given = {"loss_fn": loss, "device_num": 2, "cluster": SLOW, "comm_fusion": OPTIMAL, **options}
    return cf.compile(model, optimizer=optimizer, **given).lower(*args)


def resends(lowered: cf.Lowered) -> bool:
    return any(each.kind == "all_gather" for each in lowered.collectives)


@each_schedule
def test_it_is_taken_where_it_is_faster(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Tied(layers=4))
    options = {**options, "cluster": cluster("tied", 1e-5, 1e8)}
    taken = lower(model, *batch(8), **options)
    assert resends(taken)
    rows = [each for each in taken.collectives if "words.weight/rows" in each.members]
    whole = [each for each in taken.collectives if "words.weight" in each.members]
    assert len(rows) == len(whole) == 1 and rows != whole
    monkeypatch.setattr(ResendRows, "candidates", Pass.candidates)
    other = lower(model, *batch(8), **options)
    assert not resends(other)
    assert taken.simulate().step_seconds < other.simulate().step_seconds


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(24, {}, id="too-many-rows"),
        pytest.param(8, {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}, id="buckets-by-size"),
        pytest.param(8, {"comm_fusion": None, "cluster": None}, id="default"),
        pytest.param(8, {"device_num": 1}, id="one-rank"),
        pytest.param(8, {"optimizer": torch.optim.Adafactor}, id="opaque-update"),
    ],
)
def test_what_stays_whole(rows: int, options: dict[str, Any]) -> None:
    assert not resends(lower(Tied(), *batch(rows), **options))


def test_what_is_looked_up_last_stays_whole() -> None:
    assert not resends(lower(LookedUpLast(), *batch(8), cluster=cluster("tied", 1e-5, 1e8), schedule=ACROSS))


def test_updates_of_several_tables_run_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers come in one all_gather."""
    only(monkeypatch)
    case = CASES[-1]
    ranks = make_world(case, case.model(), 2, sgd, OPTIMAL, **OPTIONS["across"])
    train_world(ranks, case.batches(1))
    (plan,) = ranks.step.planner.plans.values()
    nodes = list(plan.compiled.program.graph.nodes)
    found = [node for node in nodes if node.target is put_rows_]
    assert len(found) == 2 and all(info(node).next_step is not None for node in found)


def test_a_parameter_with_a_fusion_id_stays_whole() -> None:
    model = Tied()
    cf.set_comm_fusion(model.words, 3)
    assert not resends(lower(model, *batch(8)))


def test_without_an_optimizer_gradients_stay_whole() -> None:
    step = cf.compile(Tied(), OPTIMAL, loss_fn=loss, device_num=2, cluster=SLOW)
    assert not resends(step.lower(*batch(8)))


def test_the_first_of_equal_rows_counts() -> None:
    whole = torch.arange(24.0).reshape(4, 3, 2)
    rows = -torch.arange(1.0, 25.0).reshape(4, 3, 2)
    result = put_rows_(whole.clone(), torch.tensor([2, 0, 2, 2]), rows)
    assert torch.equal(result, torch.stack([rows[1], whole[1], rows[0], whole[3]]))
    strided = whole.clone().transpose(1, 2)
    assert torch.equal(put_rows_(strided, torch.tensor([3]), rows.transpose(1, 2)[:1])[3], rows[0].T)


def test_the_numbers_are_there_before_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent in the forward, so that nobody waits for them where the early part is ready."""
    only(monkeypatch)
    ranks = make_world(TIED, TIED.model(), 2, sgd, OPTIMAL, **OPTIONS["across"])
    train_world(ranks, TIED.batches(1))
    (plan,) = ranks.step.planner.plans.values()
    nodes = list(plan.compiled.program.graph.nodes)
    (start,) = [node for node in nodes if (found := info(node).collective) and found.kind == "all_gather"]
    assert all((info(node).phase == "input") == (node.op == "placeholder") for node in nodes if node.op != "output")
    backward = next(i for i, node in enumerate(nodes) if info(node).phase == "backward")
    assert nodes.index(start) < backward < nodes.index(wait_of(start))


def test_a_dump_of_it_can_be_read(tmp_path: Path) -> None:
    slow = cluster("tied", 1e-5, 1e8)
    made = lower(randomised(Tied(layers=4)), *batch(8), cluster=slow, schedule=ACROSS)
    assert resends(made)
    read = load(made.dump(tmp_path))
    assert read.text() == made.text()
    assert read.simulate(slow).step_seconds == made.simulate(slow).step_seconds
    assert read.stages["resend_rows"].text() == made.stages["resend_rows"].text()
