"""Training with clip_grad_norm on all ranks in one process against torch.nn.utils.clip_grad_norm_ on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.updates.updates import unclipped
from tests.models import BF16, CONV, GPT2, MLP_CASE, PARTLY, SHARED, TIED, Case, shards
from tests.oracle import (
    ACROSS_STEPS,
    EXACT,
    PLANS,
    MakeOptimizer,
    Own,
    assert_same,
    by_class,
    clip,
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

LIMIT = 0.05
"""All gradients of these models together have a larger norm in every step."""


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)


def some(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[1:4], lr=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "adamw in groups": two_groups,
    "adagrad": by_class(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": by_class(torch.optim.RMSprop, lr=1e-2, momentum=0.9),
    "nadam": by_class(torch.optim.NAdam, lr=1e-2),
    "opaque": by_class(Own, lr=0.1, momentum=0.9),
    "some parameters": some,
}


def norm_of(case: Case, model: nn.Module, batch: Any, make: MakeOptimizer) -> float:
    mine = copy.deepcopy(model)
    for name, grad in eager_gradients(case, mine, batch).items():
        mine.get_parameter(name).grad = grad
    return float(clip(make(mine), LIMIT))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_those_of_one_device(make: MakeOptimizer, world: int) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(3, rows=12)
    assert norm_of(MLP_CASE, model, batches[0], make) > 2 * LIMIT
    ranks = make_world(MLP_CASE, model, world, make, clip_grad_norm=LIMIT)
    want = train_reference(MLP_CASE, model, batches, world, make, max_norm=LIMIT)
    assert_same(train_world(ranks, batches), want, EXACT)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("threshold", [0, 1])
@pytest.mark.parametrize(
    "config",
    [
        {"pad": True},
        {"pad": True, "level": 2},
        {"pad": True, "level": 3},
        {"pad": True, "optimizer_weight_shard_size": 2},
        {"mode": "broadcast"},
    ],
    ids=["rows", "early", "gathered for each use", "some ranks", "owners"],
)
@pytest.mark.parametrize("name", ["sgd", "adamw in groups", "some parameters"])
def test_ranks_that_share_the_updates_among_them(name: str, config: dict[str, Any], threshold: int, world: int) -> None:
    """All parameters are shared among the ranks, or the large ones. Their rows are padded, where the norm must not
    notice it."""
    make, model, batches = OPTIMIZERS[name], MLP_CASE.model(), MLP_CASE.batches(3, rows=16)
    config = {"parallel_optimizer_threshold": threshold, **config}
    options: dict[str, Any] = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    ranks = make_world(MLP_CASE, model, world, make, clip_grad_norm=LIMIT, **options)
    want = train_reference(MLP_CASE, model, batches, world, make, max_norm=LIMIT)
    assert_same(train_world(ranks, batches), want, EXACT)
    sent = [each for each in collectives(ranks, batches[0]) if each.kind == "all_reduce" and each.phase == "update"]
    assert [each.bytes for each in sent] == [8]


@pytest.mark.parametrize("case", [CONV, TIED, SHARED, PARTLY, GPT2], ids=lambda case: case.name)
@each_plan
def test_models(case: Case, plan: dict[str, Any]) -> None:
    model, batches = case.model(), case.batches(3)
    ranks = make_world(case, model, 2, sgd, clip_grad_norm=LIMIT, **plan)
    want = train_reference(case, model, batches, 2, sgd, max_norm=LIMIT)
    assert_same(train_world(ranks, batches), want, 1e-6 if case is GPT2 else EXACT)


@pytest.mark.parametrize("make", [two_groups, OPTIMIZERS["rmsprop"], OPTIMIZERS["opaque"]], ids=lambda make: "")
def test_all_plans_train_to_the_same_bits(make: MakeOptimizer) -> None:
    """The norm is that of the norms of single parameters, in their order, however they are sent and stored."""
    model, batches = MLP_CASE.model(torch.float32), MLP_CASE.batches(3, dtype=torch.float32)
    plans = {**PLANS, "unfused": {"comm_fusion": {"openstate": False}}, "in order": {"schedule": "none"}}
    first, *others = (
        train_world(make_world(MLP_CASE, copy.deepcopy(model), 2, make, clip_grad_norm=LIMIT, **plan), batches)
        for plan in plans.values()
    )
    for other in others:
        assert_same(other, first, 0)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_limit_that_is_not_reached_changes_no_bit(make: MakeOptimizer) -> None:
    model, batches = MLP_CASE.model(torch.float32), MLP_CASE.batches(3, dtype=torch.float32)
    clipped, plain = (
        train_world(make_world(MLP_CASE, copy.deepcopy(model), 2, make, **options), batches)
        for options in ({"clip_grad_norm": 1e6}, {})
    )
    assert_same(clipped, plain, 0)


class TwoPrecisions(nn.Module):
    """Layers of two dtypes, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 5).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).bfloat16()) * self.scale).float()


@pytest.mark.parametrize("make", [by_class(torch.optim.Adagrad, lr=1e-2), OPTIMIZERS["opaque"]], ids=["rule", "opaque"])
@pytest.mark.parametrize("world", [1, 2])
def test_dtypes_side_by_side_are_clipped_as_torch_does_it(make: MakeOptimizer, world: int) -> None:
    torch.manual_seed(0)
    case = Case("two precisions", TwoPrecisions, MLP_CASE.batch, coupled=True)
    model, batches = TwoPrecisions(), MLP_CASE.batches(3, dtype=torch.float32)
    ranks = make_world(case, model, world, make, clip_grad_norm=LIMIT)
    want = train_reference(case, model, batches, world, make, max_norm=LIMIT)
    assert_same(train_world(ranks, batches), want, 2**-7)
    assert_same(ranks.models, want, 0) if make is OPTIMIZERS["opaque"] else None


@pytest.mark.parametrize("fp32", [True, False])
def test_low_precision(fp32: bool) -> None:
    """With sums in float32 a cast lies between what is sent and what is clipped."""
    model, batches = BF16.model(torch.bfloat16), BF16.batches(3, dtype=torch.bfloat16)
    options = {"clip_grad_norm": LIMIT, "gradient_fp32_sync": fp32}
    ranks = make_world(BF16, copy.deepcopy(model), 2, two_groups, **options)
    plain = make_world(BF16, copy.deepcopy(model), 2, two_groups, {"openstate": False}, **options)
    case = Case("bf16", BF16.build, BF16.batch, coupled=True)
    want = train_reference(case, model, batches, 2, two_groups, max_norm=LIMIT)
    assert_same(train_world(ranks, batches), train_world(plain, batches), 2**-6)
    assert_same(ranks.models, want, 2**-5)
    casts = [line for line in text(ranks, batches[0]).splitlines() if line.startswith("upd") and "_to_copy" in line]
    assert len(casts) == (2 if fp32 else 0), "one cast for the norm and the update of all that lies together"


def text(ranks: Any, batch: Any) -> str:
    return ranks.step.lower(*shards(batch, len(ranks.models))[0]).text()


def test_sums_of_gradients_are_clipped_where_they_are_not_averaged() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    ranks = make_world(MLP_CASE, model, 2, some, clip_grad_norm=LIMIT, gradients_mean=False)
    mine = copy.deepcopy(model)
    for part in shards(batch, 2):
        F.cross_entropy(mine(part[0]), part[1]).backward()
    optimizer = some(mine)
    clip(optimizer, LIMIT)
    optimizer.step()
    assert_same(train_world(ranks, [batch]), [mine] * 2)


def test_gradients_that_are_not_finite_do_what_they_do_in_torch() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    batch[0][0, 0] = float("inf")
    ranks = make_world(MLP_CASE, model, 2, sgd, clip_grad_norm=LIMIT)
    want = train_reference(MLP_CASE, model, [batch], 2, sgd, max_norm=LIMIT)
    for mine, other in zip(train_world(ranks, [batch]), want, strict=True):
        for one, two in zip(tensors_of(mine).values(), tensors_of(other).values(), strict=True):
            assert torch.equal(one.isnan(), two.isnan()) and one.isnan().all()


def test_nothing_more_is_sent_where_all_ranks_have_the_gradients() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    ranks, plain = (
        make_world(MLP_CASE, model, 2, two_groups, **options) for options in ({"clip_grad_norm": LIMIT}, {})
    )
    assert collectives(ranks, batch) == collectives(plain, batch)
    lowered = ranks.step.lower(*shards(batch, 2)[0])
    assert "clip_gradients" in lowered.stages and "clip_gradients" not in plain.step.lower(*shards(batch, 2)[0]).stages
    assert f"# clip_grad_norm: {LIMIT}" in lowered.text() and "clip_grad_norm" not in text(plain, batch)
    scaled = [
        node for node in lowered.program.graph.nodes if node.op == "call_function" and unclipped(node) is not node
    ]
    assert [node.target for node in scaled] == [torch.ops.aten.mul_.Tensor] * 2, "in place, and once per param group"


def test_across_steps_all_updates_wait_for_the_norm() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    for limit in (None, LIMIT):
        ranks = make_world(MLP_CASE, model, 2, sgd, clip_grad_norm=limit, **ACROSS_STEPS)
        lowered = ranks.step.lower(*shards(batch, 2)[0])
        assert ("in the next step" in lowered.text()) == (limit is None)
    assert "no update can wait for the next step" in lowered.explain().text()


# Layers that every rank trains by itself


OWN = ("2.weight", "2.bias")


def own_layers(limit: float) -> tuple[Any, list[nn.Module], Any]:
    """Two ranks, what they should come to, and the batch."""
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    make = by_class(torch.optim.SGD, lr=0.5)
    for name in OWN:
        model.get_parameter(name).layerwise_parallel = True
    mean = eager_gradients(MLP_CASE, model, batch)
    local = [eager_gradients(MLP_CASE, model, part) for part in shards(batch, 2)]
    all_of_them = [
        *(grad for name, grad in mean.items() if name not in OWN),
        *(each[name] for each in local for name in OWN),
    ]
    norm = torch.nn.utils.get_total_norm(all_of_them)
    scale = min(limit / (float(norm) + 1e-6), 1.0)
    want = []
    for rank in range(2):
        mine = copy.deepcopy(model)
        with torch.no_grad():
            for name, param in mine.named_parameters():
                param -= 0.5 * scale * (local[rank] if name in OWN else mean)[name]
        want.append(mine)
    return make_world(MLP_CASE, model, 2, make, parallel_mode="hybrid_parallel", clip_grad_norm=limit), want, batch


def test_parameters_of_single_ranks_count_once_each() -> None:
    ranks, want, batch = own_layers(LIMIT)
    assert_same(train_world(ranks, [batch]), want)
    sent = [each for each in collectives(ranks, batch) if each.phase == "update"]
    assert [(each.kind, each.reduce_op, each.bytes, each.group) for each in sent] == [("all_reduce", "sum", 8, (0, 1))]
    lowered = ranks.step.lower(*shards(batch, 2)[0])
    assert "the squares of the parts are added up over dp" in lowered.explain().text()


def test_without_the_norms_collective_ranks_part() -> None:
    ranks, _, batch = own_layers(LIMIT)
    lowered = ranks.step.lower(*shards(batch, 2)[0])
    (name,) = [info(node).name for node in lowered.program.collectives() if info(node).phase == "update"]
    assert cf.lockstep(lowered)(*batch).disagreement is None
    found = cf.lockstep(lowered, drop=[name])(*batch).disagreement
    assert found is not None and found.node.startswith("update/")
