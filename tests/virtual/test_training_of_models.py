"""Training on all ranks in one process against one device: gradients and parameters of whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.models import (
    BERT_CLASSIFIER,
    BERT_MLM,
    BF16,
    CASES,
    CONTRASTIVE,
    CONV,
    DIGITS,
    GPT2,
    MLP,
    MLP_CASE,
    PARTLY,
    SHARED,
    TIED,
    WIDE,
    Case,
    shards,
)
from tests.oracle import (
    ACROSS,
    ACROSS_STEPS,
    APART_ACROSS_STEPS,
    FAST,
    OPTIMAL,
    SLOW,
    MakeOptimizer,
    assert_same,
    assert_same_tensors,
    by_class,
    collectives,
    each_plan,
    eager_gradients,
    make_world,
    sgd,
    tensors_of,
    train_reference,
    train_world,
)

pytestmark = pytest.mark.usefixtures("no_other_plan")

OFF = {"openstate": False}
FUSIONS: dict[str, Any] = {
    "auto": None,
    "off": OFF,
    "size": {"allreduce": {"mode": "size", "config": 1}},
    "index": {"allreduce": {"mode": "index", "config": [2, 5]}},
    "ids": None,
}

# Plans by cost: fusion, and the options of the schedule.
COSTED: dict[str, dict[str, Any]] = {
    "optimal-slow": {"comm_fusion": OPTIMAL, "cluster": SLOW},
    "optimal-fast": {"comm_fusion": OPTIMAL, "cluster": FAST},
    "optimal-slow-across": ACROSS_STEPS,
    "optimal-fast-across": {**ACROSS_STEPS, "cluster": FAST},
    "auto-across": {**ACROSS_STEPS, "comm_fusion": None},
    "off-across": APART_ACROSS_STEPS,
}
SENT: list[tuple[str, Any]] = [("auto", None), ("off", OFF), ("optimal", OPTIMAL)]


def turns(plans: Iterable[str]) -> list[Any]:
    """(case, plan, ranks): every case with every plan, some on 2 ranks and some on 4.

    The two BERTs, which are one model with two heads, share the plans.
    """
    berts = (BERT_MLM, BERT_CLASSIFIER)
    found = []
    for row, case in enumerate(CASES):
        for column, plan in enumerate(plans):
            if case in berts and case is not berts[column % 2]:
                continue
            world = (2, 4)[(row + column + column // 2) % 2]
            found.append(pytest.param(case, plan, world, id=f"{case.name}-{plan}-{world}"))
    return found


# On one rank, where nothing is sent, each case once.
ALONE = [
    pytest.param(case, list(FUSIONS)[number % len(FUSIONS)], 1, id=f"{case.name}-alone")
    for number, case in enumerate(CASES)
]


def trainables(model: nn.Module) -> int:
    return sum(param.requires_grad for param in model.parameters())


def mark_ids(model: nn.Module, fusion: str) -> None:
    """For "ids": never fused, bucket 1 and bucket 2 in turn."""
    if fusion == "ids":
        for number, param in enumerate(model.parameters()):
            param.comm_fusion = number % 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(("case", "fusion", "world"), [*turns(FUSIONS), *ALONE])
def test_parameters_after_three_steps(case: Case, fusion: str, world: int) -> None:
    model, batches = case.model(), case.batches(3)
    mark_ids(model, fusion)
    want = train_reference(case, model, batches, world, sgd)
    assert_same(train_world(make_world(case, model, world, sgd, FUSIONS[fusion]), batches), want)


@pytest.mark.parametrize(("case", "plan", "world"), turns(COSTED))
def test_parameters_with_plans_by_cost(case: Case, plan: str, world: int) -> None:
    model, batches = case.model(), case.batches(3)
    want = train_reference(case, model, batches, world, sgd)
    assert_same(train_world(make_world(case, model, world, sgd, **COSTED[plan]), batches), want)


@pytest.mark.parametrize("case", [DIGITS, CONV, CONTRASTIVE, PARTLY], ids=lambda case: case.name)
@pytest.mark.parametrize("plan", ["optimal-slow", "optimal-slow-across"])
def test_plans_by_cost_on_one_rank(case: Case, plan: str) -> None:
    model, batches = case.model(), case.batches(3)
    want = train_reference(case, model, batches, 1, sgd)
    world = make_world(case, model, 1, sgd, **COSTED[plan])
    assert_same(train_world(world, batches), want)
    assert not world.is_pending


@pytest.mark.parametrize("fusion", ["size", "index", "ids"])
@pytest.mark.parametrize("case", [WIDE, TIED, GPT2], ids=lambda case: case.name)
def test_every_fusion_across_steps(case: Case, fusion: str) -> None:
    model, batches = case.model(), case.batches(3)
    mark_ids(model, fusion)
    want = train_reference(case, model, batches, 2, sgd)
    world = make_world(case, model, 2, sgd, FUSIONS[fusion], cluster=SLOW, schedule=ACROSS)
    for batch in batches:
        world(shards(batch, 2))
        assert world.is_pending
    assert_same(world.models, want)


@pytest.mark.parametrize(
    ("case", "fusion"),
    [
        *(pytest.param(case, fusion, id=f"{case.name}-{name}") for case in (WIDE, CONV) for name, fusion in SENT),
        pytest.param(GPT2, OPTIMAL, id="gpt2-optimal"),
    ],
)
def test_the_schedule_changes_no_gradient(case: Case, fusion: Any) -> None:
    """Losses of later steps show the parameters of earlier ones, bit by bit but for the rounding of updates."""
    batches = case.batches(4)
    plain, across = (
        make_world(case, case.model(), 4, sgd, fusion, cluster=SLOW, schedule=schedule) for schedule in ("none", ACROSS)
    )
    for batch in batches:
        parts = shards(batch, 4)
        for mine, other in zip(across(parts), plain(parts), strict=True):
            torch.testing.assert_close(mine.loss, other.loss, rtol=1e-13, atol=0)
    assert across.is_pending and not plain.is_pending
    assert_same(across.models, plain.models, tolerance=1e-13)


@pytest.mark.parametrize("case", [case for case in CASES if "bert" not in case.name], ids=lambda case: case.name)
def test_gradients(case: Case) -> None:
    model, batches = case.model(), case.batches(1)
    want = train_reference(case, model, batches, 4)
    assert_same(train_world(make_world(case, model, 4), batches), want, gradients=True)


@pytest.mark.parametrize("case", [DIGITS, WIDE, CONV], ids=lambda case: case.name)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradients_with_every_fusion(case: Case, fusion: str) -> None:
    model, batches = case.model(), case.batches(2)
    mark_ids(model, fusion)
    want = train_reference(case, model, batches, 2)
    assert_same(train_world(make_world(case, model, 2, None, FUSIONS[fusion]), batches), want, gradients=True)


@pytest.mark.parametrize("case", [DIGITS, WIDE, CONV, CONTRASTIVE, GPT2], ids=lambda case: case.name)
@pytest.mark.parametrize("plan", ["optimal-slow", "optimal-fast", "optimal-slow-across"])
def test_gradients_with_plans_by_cost(case: Case, plan: str) -> None:
    model, batches = case.model(), case.batches(2)
    want = train_reference(case, model, batches, 2)
    assert_same(train_world(make_world(case, model, 2, **COSTED[plan]), batches), want, gradients=True)


@pytest.mark.parametrize(
    ("fusion", "buckets"),
    [
        ("auto", [14]),
        ("off", [1] * 14),
        ("size", [14]),
        ("index", [9, 3, 2]),
        ("ids", [5, 1, 4, 1, 1, 1, 1]),
    ],
)
def test_how_many_gradients_go_together(fusion: str, buckets: list[int]) -> None:
    model, (batch,) = DIGITS.model(), DIGITS.batches(1)
    mark_ids(model, fusion)
    sizes = [len(each.members) for each in collectives(make_world(DIGITS, model, 2, sgd, FUSIONS[fusion]), batch)]
    assert sorted(sizes) == sorted(buckets)


@each_plan
def test_a_world_of_three_and_a_mesh(plan: dict[str, Any]) -> None:
    model, batches = DIGITS.model(), DIGITS.batches(2, rows=12)
    want = train_reference(DIGITS, model, batches, 1, sgd)
    assert_same(train_world(make_world(DIGITS, copy.deepcopy(model), 3, sgd, **plan), batches), want * 3)
    assert_same(train_world(make_world(DIGITS, model, 4, sgd, mesh=(2, 2), **plan), batches), want * 4)


@pytest.mark.parametrize("case", [case for case in CASES if case is not BERT_CLASSIFIER], ids=lambda case: case.name)
def test_fusion_keeps_the_bits_on_two_ranks(case: Case) -> None:
    (batch,) = case.batches(1, dtype=torch.float32)
    fused, unfused = (
        train_world(make_world(case, case.model(torch.float32), 2, None, fusion), [batch]) for fusion in (None, OFF)
    )
    for mine, other in zip(fused, unfused, strict=True):
        have, want = tensors_of(mine, gradients=True), tensors_of(other, gradients=True)
        assert have.keys() == want.keys()
        assert all(torch.equal(have[name], want[name]) for name in want)


FULL_VECTORS = Case("full_vectors", lambda: MLP(width=32, inputs=16, classes=16), lambda rows: _full_batch(rows))


def _full_batch(rows: int) -> Any:
    return torch.randn(rows, 16), torch.randint(16, (rows,))


@pytest.mark.parametrize("case", [FULL_VECTORS, DIGITS, CONV, TIED], ids=lambda case: case.name)
def test_fusion_and_parameters_on_two_ranks(case: Case) -> None:
    """The last elements of a tensor that does not fill whole vectors may differ by the rounding of the update,
    2**-24 per step; what follows from that, by as much as gradients magnify it."""
    batches = case.batches(3, dtype=torch.float32)
    fused, unfused = (
        train_world(make_world(case, case.model(torch.float32), 2, sgd, fusion), batches) for fusion in (None, OFF)
    )
    assert_same(fused, unfused, tolerance=0 if case is FULL_VECTORS else 1e-6)


@pytest.mark.parametrize("case", [DIGITS, CONV, TIED], ids=lambda case: case.name)
@pytest.mark.parametrize("make_optimizer", [sgd, by_class(torch.optim.AdamW, lr=1e-3, eps=1e-3)], ids=["sgd", "adamw"])
@each_plan
def test_float32(case: Case, make_optimizer: MakeOptimizer, plan: dict[str, Any]) -> None:
    """1e-5: rounding of 3 steps at 2**-24, with a few hundred summands per gradient."""
    model, batches = case.model(torch.float32), case.batches(3, dtype=torch.float32)
    want = train_reference(case, model, batches, 4, make_optimizer)
    assert_same(train_world(make_world(case, model, 4, make_optimizer, **plan), batches), want, tolerance=1e-5)


@each_plan
def test_all_ranks_end_with_the_same_bits(plan: dict[str, Any]) -> None:
    models = train_world(
        make_world(MLP_CASE, MLP_CASE.model(torch.float32), 4, sgd, **plan), MLP_CASE.batches(3, dtype=torch.float32)
    )
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))


def test_sum_of_gradients() -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(1)
    want = {name: 4 * grad for name, grad in eager_gradients(MLP_CASE, model, batches[0]).items()}
    for mine in train_world(make_world(MLP_CASE, model, 4, gradients_mean=False), batches):
        assert_same_tensors(tensors_of(mine, gradients=True), want, 1e-10)


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("fusion", [None, OFF], ids=["fused", "unfused"])
def test_low_precision_gradients(fp32: bool, fusion: Any) -> None:
    model, (batch,) = BF16.model(torch.bfloat16), BF16.batches(1, dtype=torch.bfloat16)
    wire = torch.float32 if fp32 else torch.bfloat16
    parts = [eager_gradients(BF16, model, part) for part in shards(batch, 4)]
    want: dict[str, torch.Tensor] = {}
    for name in parts[0]:
        total = parts[0][name].to(wire)
        for part in parts[1:]:
            total = total + part[name].to(wire)
        want[name] = (total / 4).bfloat16()
    world = make_world(BF16, model, 4, None, fusion, gradient_fp32_sync=fp32)
    assert {each.dtype for each in collectives(world, batch)} == {wire}
    for mine in train_world(world, [batch]):
        assert_same_tensors(tensors_of(mine, gradients=True), want, 0)


@pytest.mark.parametrize("whole_step", [True, False], ids=["whole_step", "gradients"])
@each_plan
def test_layerwise_parallel_gradients_stay_on_their_rank(whole_step: bool, plan: dict[str, Any]) -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    own = [name for name, _ in model.named_parameters()][1:4]
    for name in own:
        model.get_parameter(name).layerwise_parallel = True  # type: ignore[attr-defined]
    mean = eager_gradients(MLP_CASE, model, batch)
    local = [eager_gradients(MLP_CASE, model, part) for part in shards(batch, 2)]
    want = [{name: local[rank][name] if name in own else mean[name] for name in mean} for rank in range(2)]
    if whole_step:
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        want = [{name: before[name] - 0.5 * grads[name] for name in grads} for grads in want]
    optimizer = by_class(torch.optim.SGD, lr=0.5) if whole_step else None
    world = make_world(MLP_CASE, model, 2, optimizer, parallel_mode="hybrid_parallel", **plan)
    for mine, wanted in zip(train_world(world, [batch]), want, strict=True):
        assert_same_tensors(tensors_of(mine, gradients=not whole_step), wanted, 1e-10)


def test_stand_alone_has_no_collectives() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    local = [eager_gradients(MLP_CASE, model, part) for part in shards(batch, 2)]
    world = make_world(MLP_CASE, model, 2, parallel_mode="stand_alone")
    assert collectives(world, batch) == []
    for mine, want in zip(train_world(world, [batch]), local, strict=True):
        assert_same_tensors(tensors_of(mine, gradients=True), want, 1e-10)


@pytest.mark.parametrize("world", [2, 4])
@each_plan
def test_full_batch(world: int, plan: dict[str, Any]) -> None:
    model, batches = DIGITS.model(), DIGITS.batches(2)
    want = train_reference(DIGITS, model, batches, world, sgd)
    ranks = make_world(DIGITS, model, world, sgd, full_batch=True, **plan)
    for batch in batches:
        ranks([batch] * world)
    assert_same(ranks.models, want)


@pytest.mark.parametrize("case", [DIGITS, TIED, SHARED], ids=lambda case: case.name)
def test_gradients_accumulate_over_calls(case: Case) -> None:
    model, batches = case.model(), case.batches(2)
    want = train_reference(case, model, batches, 2)
    assert_same(train_world(make_world(case, model, 2), batches), want, gradients=True)


def test_losses_are_those_of_the_ranks_own_batches() -> None:
    model, (batch,) = DIGITS.model(), DIGITS.batches(1)
    want = [DIGITS.loss_fn(model(part[0]), part[1]) for part in shards(batch, 4)]  # type: ignore[misc]
    have = [result.loss for result in make_world(DIGITS, copy.deepcopy(model), 4)(shards(batch, 4))]
    torch.testing.assert_close(have, [loss.detach() for loss in want], rtol=1e-12, atol=0)


@pytest.mark.parametrize("fusion", [None, OFF], ids=["fused", "unfused"])
def test_parameters_with_one_gradient(fusion: Any) -> None:
    """a and b of a + b: reduced once, and each has a gradient of its own to add to."""
    model, (batch,) = SHARED.model(), SHARED.batches(1)
    world = make_world(SHARED, model, 2, None, fusion)
    members = sorted(name for each in collectives(world, batch) for name in each.members)
    assert members == ["a", "b", "c"]
    assert len(collectives(world, batch)) == (1 if fusion is None else 2)
    for mine in train_world(world, [batch]):
        a, b = mine.get_parameter("a").grad, mine.get_parameter("b").grad
        assert a is not None and b is not None
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


class TransposedWeight(nn.Module):
    """A parameter with column-major memory whose gradient arrives through a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 12).t())
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.tanh(self.weight.reshape(3, 4, 6)).reshape(12, 6) + self.bias


@pytest.mark.parametrize("make_optimizer", [None, sgd], ids=["gradients", "whole_step"])
@each_plan
def test_column_major_parameters(make_optimizer: MakeOptimizer | None, plan: dict[str, Any]) -> None:
    case = Case("transposed", TransposedWeight, MLP_CASE.batch)
    model, batches = case.model(), case.batches(2)
    want = train_reference(case, model, batches, 2, make_optimizer)
    world = make_world(case, model, 2, make_optimizer, **plan)
    assert_same(train_world(world, batches), want, gradients=make_optimizer is None)


class InPlaceAfterSending(nn.Module):
    """Adds to a tensor right after it was handed to a collective."""

    def __init__(self, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 8)
        self.send = send

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        sent = self.send(x)
        x = (x + 1.0) * 2.0
        return x + sent.sum(0)


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast"])
def test_what_is_on_the_wire_is_not_overwritten(kind: str) -> None:
    send = getattr(cf.ops, kind)
    case = Case("wire", lambda: InPlaceAfterSending(send), MLP_CASE.batch)
    model, (batch,) = case.model(), case.batches(1)
    results = [
        make_world(case, copy.deepcopy(model), 2, schedule=schedule)(shards(batch, 2))
        for schedule in ("overlap", "none")
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=0)
        assert_same_tensors(dict(one.grads), dict(other.grads), 1e-12)
