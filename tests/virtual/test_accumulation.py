"""Several calls for one update on all ranks in one process, against one device and against eager micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from tests.models import BF16, CONV, GPT2, MLP_CASE, PARTLY, SHARED, TIED, Batch, Case, shards
from tests.oracle import (
    ACROSS_STEPS,
    EXACT,
    PLANS,
    MakeOptimizer,
    Own,
    assert_same,
    assert_same_tensors,
    by_class,
    each_plan,
    eager_gradients,
    make_world,
    sgd,
    tensors_of,
    train_reference,
    train_world,
)

pytestmark = pytest.mark.usefixtures("no_other_plan")

LIMIT = 0.05
own = by_class(Own, lr=0.1, momentum=0.9)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)


def some(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[1:4], lr=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": two_groups, "opaque": own, "some parameters": some}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unfused": {"comm_fusion": {"openstate": False}},
    "across steps": ACROSS_STEPS,
    "a mesh": {"mesh": (1, 3)},
    "clipped": {"clip_grad_norm": LIMIT},
}


def joined(batches: list[Batch], count: int) -> list[Batch]:
    """Batches of so many times the size."""
    groups = [batches[begin : begin + count] for begin in range(0, len(batches), count)]
    return [tuple(torch.cat(parts) for parts in zip(*group, strict=True)) for group in groups]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_micro_batches_are_one_large_batch(make: MakeOptimizer, world: int, count: int) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(3 * count)
    batches = [tuple(tensor[:6] for tensor in batch) for batch in batches]
    ranks = make_world(MLP_CASE, model, world, make, accumulate_steps=count)
    want = train_reference(MLP_CASE, model, joined(batches, count), world, make)
    assert_same(train_world(ranks, batches), want, EXACT)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", [two_groups, own], ids=["adamw", "opaque"])
def test_options(make: MakeOptimizer, options: dict[str, Any]) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(6, rows=6)
    ranks = make_world(MLP_CASE, model, 3, make, accumulate_steps=2, **options)
    want = train_reference(MLP_CASE, model, joined(batches, 2), 3, make, max_norm=options.get("clip_grad_norm"))
    assert_same(train_world(ranks, batches), want, EXACT)


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize(
    "config",
    [{"pad": True}, {"pad": True, "level": 2}, {"pad": True, "optimizer_weight_shard_size": 2}, {"mode": "broadcast"}],
    ids=["rows", "early", "some ranks", "owners"],
)
def test_ranks_that_share_the_updates_among_them(config: dict[str, Any], limit: float | None) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(6, rows=8)
    config = {"parallel_optimizer_threshold": 0, **config}
    options: dict[str, Any] = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    ranks = make_world(MLP_CASE, model, 4, two_groups, accumulate_steps=2, clip_grad_norm=limit, **options)
    want = train_reference(MLP_CASE, model, joined(batches, 2), 4, two_groups, max_norm=limit)
    assert_same(train_world(ranks, batches), want, EXACT)


@pytest.mark.parametrize("case", [CONV, TIED, SHARED, PARTLY, GPT2], ids=lambda case: case.name)
@each_plan
def test_models_do_what_eager_micro_batches_do(case: Case, plan: dict[str, Any]) -> None:
    """Each micro-batch moves the statistics of BatchNorm."""
    model, batches = case.model(), case.batches(6)
    ranks = make_world(case, model, 2, sgd, accumulate_steps=3, **plan)
    want = train_reference(case, model, batches, 2, sgd, micro_batches=3)
    assert_same(train_world(ranks, batches), want, 1e-6 if case is GPT2 else EXACT)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_bits_of_eager_micro_batches(dtype: torch.dtype, world: int) -> None:
    case = Case("same bits", BF16.build, BF16.batch, coupled=True)
    model, batches = case.model(dtype), case.batches(6, dtype=dtype)
    ranks = make_world(case, copy.deepcopy(model), world, own, accumulate_steps=2)
    want = train_reference(case, model, batches, world, own, micro_batches=2)
    assert_same(train_world(ranks, batches), want, 0)


def test_all_plans_train_to_the_same_bits() -> None:
    model, batches = MLP_CASE.model(torch.float32), MLP_CASE.batches(6, dtype=torch.float32)
    plans = {**PLANS, "unfused": {"comm_fusion": {"openstate": False}}, "in order": {"schedule": "none"}}
    first, *others = (
        train_world(make_world(MLP_CASE, copy.deepcopy(model), 2, two_groups, accumulate_steps=3, **plan), batches)
        for plan in plans.values()
    )
    for other in others:
        assert_same(other, first, 0)


def test_gradients_are_added_up_where_they_are_not_averaged() -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(2)
    make = by_class(torch.optim.SGD, lr=0.1)
    ranks = make_world(MLP_CASE, copy.deepcopy(model), 2, make, accumulate_steps=2, gradients_mean=False)
    for batch in batches:
        for part in shards(batch, 2):
            F.cross_entropy(model(part[0]), part[1]).backward()
    make(model).step()
    assert_same(train_world(ranks, batches), [model] * 2)


def test_losses_are_those_of_the_micro_batches() -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(2)
    ranks = make_world(MLP_CASE, model, 2, sgd, accumulate_steps=2)
    for batch in batches:
        want = [float(F.cross_entropy(model(part[0]), part[1])) for part in shards(batch, 2)]
        assert [float(result.loss) for result in ranks(shards(batch, 2))] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("mode", ["hybrid_parallel", "stand_alone"])
def test_gradients_that_ranks_keep_for_themselves(mode: str) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(2)
    local = [name for name, _ in model.named_parameters()]
    if mode == "hybrid_parallel":
        local = local[1:4]
        for name in local:
            model.get_parameter(name).layerwise_parallel = True
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    (large,) = joined(batches, 2)
    mean = eager_gradients(MLP_CASE, model, large)
    rows = [joined([shards(batch, 2)[rank] for batch in batches], 2)[0] for rank in range(2)]
    of_ranks = [eager_gradients(MLP_CASE, model, part) for part in rows]
    ranks = make_world(MLP_CASE, model, 2, by_class(torch.optim.SGD, lr=0.5), accumulate_steps=2, parallel_mode=mode)
    for rank, mine in enumerate(train_world(ranks, batches)):
        want = {n: before[n] - 0.5 * (of_ranks[rank] if n in local else mean)[n] for n in before}
        assert_same_tensors(tensors_of(mine), want, EXACT)


def test_full_batches() -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(4)
    ranks = make_world(MLP_CASE, model, 2, sgd, accumulate_steps=2, full_batch=True)
    want = train_reference(MLP_CASE, model, joined(batches, 2), 2, sgd)
    for batch in batches:
        ranks([batch, batch])
    assert_same(ranks.models, want, EXACT)


def test_only_the_last_micro_batch_sends_and_updates() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    step = make_world(MLP_CASE, model, 2, two_groups, accumulate_steps=4, clip_grad_norm=LIMIT).step
    part = shards(batch, 2)[0]
    early, last = step.lower_micro_batch(*part), step.lower(*part)
    assert early.collectives == [] and len(last.collectives) == 1 and last.collectives[0].phase == "backward"
    assert not early.program.updates and last.program.updates
    assert {"hold_gradients", "average_micro_batches"} <= {*early.stages} and "clip_gradients" not in early.stages
    assert {"add_held_gradients", "average_micro_batches", "clip_gradients"} <= {*last.stages}
    assert "# accumulate_steps: 4" in early.text() and "# accumulate_steps: 4" in last.text()
    assert early.fingerprint != last.fingerprint
    held = [f"in  %{name}.grad: " for name, _ in model.named_parameters()]
    assert all(line in lowered.text() for line in held for lowered in (early, last))
    copies = [node for node in last.program.graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert not copies, "sums are computed in their places in the bucket"
    (sums,) = [each for each in last.explain().memory.held if each.kind == "sums of micro-batches"]
    assert sums.per_rank == sums.whole == sum(param.nbytes for param in model.parameters())


def test_lockstep_compares_every_micro_batch_and_drops_collectives_of_the_last() -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(4)
    step = make_world(MLP_CASE, copy.deepcopy(model), 2, sgd, accumulate_steps=2).step
    lowered = step.lower(*shards(batches[0], 2)[0])
    check = cf.lockstep(lowered)
    for batch in batches:
        assert check(*batch).disagreement is None
    assert_same(check.models, train_reference(MLP_CASE, model, joined(batches, 2), 2, sgd), EXACT)
    (name,) = [info(node).name for node in lowered.program.collectives()]
    dropped = cf.lockstep(lowered, drop=[name])
    assert dropped(*batches[0]).disagreement is None and dropped(*batches[1]).disagreement is not None
