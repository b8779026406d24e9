"""clip_grad_norm where parameters are divided among ranks: the norm is that of the whole gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from tests.models import GPT2, MLP_CASE, Case
from tests.oracle import MakeOptimizer, Own, assert_same_tensors, by_class, clip, sgd, tensors_of
from tests.sharding.divided_oracle import EXACT, SINGLE, Divided, Mark, divided, loss_of, no_marks

LIMIT = 0.05
"""All gradients of these models together have a larger norm in every step."""

adamw = by_class(torch.optim.AdamW, lr=1e-2)


def columns(model: nn.Module) -> None:
    """The first weight by rows over tp, and what follows from that."""
    cf.shard(model[0], weight=("tp", None), bias=("tp",))
    cf.shard(model[2], weight=(None, "tp"))


def over_both_axes(model: nn.Module) -> None:
    """One weight over tp, one over dp, and one over both."""
    cf.shard(model[0].weight, ("tp", None))
    cf.shard(model[2].weight, ("dp", None))
    cf.shard(model[4].weight, ("dp", "tp"))


def language(model: nn.Module) -> None:
    """Heads, their fused projection and hidden units over tp."""
    cf.shard(model.model, cf.plans.tensor_parallel(model.model, axis="tp"))


def check(mesh: tuple[int, ...], mark: Mark, make: MakeOptimizer, case: Case = MLP_CASE, **options: Any) -> Divided:
    """Three steps on all ranks, against one device that clips."""
    model, batches = case.model(), case.batches(3)
    found = divided(case, model, mesh, mark, make, clip_grad_norm=LIMIT, **options)
    reference = copy.deepcopy(model)
    optimizer = make(reference)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(case, reference, batch, {}).backward()
        assert float(clip(optimizer, LIMIT)) > 2 * LIMIT
        optimizer.step()
        found.run(batch)
    for rank, mine in enumerate(found.world.models):
        assert_same_tensors(
            tensors_of(mine), tensors_of(reference), SINGLE if case is GPT2 else EXACT, f"rank {rank}: "
        )
    return found


def sent(found: Divided) -> list[tuple[str, str, int]]:
    """The collectives of the update: kind, group and bytes."""
    each = [info(node) for node in found.program.collectives() if info(node).phase == "update"]
    return [(node.collective.kind, node.collective.group, node.collective.nbytes) for node in each if node.collective]


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_one_number_is_summed_over_the_axis_that_divides_parameters(make: MakeOptimizer) -> None:
    assert sent(check((2, 2), columns, make)) == [("all_reduce", "tp", 8)]


def test_ranks_that_are_handed_their_part_of_the_batch() -> None:
    assert sent(check((2, 2), columns, sgd, ways=2)) == [("all_reduce", "tp", 8)]


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)], ids=str)
def test_one_number_for_parameters_that_are_divided_over_other_axes(mesh: tuple[int, ...]) -> None:
    """Where ranks have the same part, each adds its share of it."""
    found = check(mesh, over_both_axes, sgd)
    assert sent(found) == [("all_reduce", "dp,tp", 8)]
    norms = [info(node).name for node in found.program.graph.nodes if info(node).name.startswith("update/norms.")]
    assert {"update/norms.dp", "update/norms.tp", "update/norms.dp+tp"} <= {*norms}


def test_nothing_is_sent_where_every_rank_has_all_parameters() -> None:
    assert sent(check((4,), no_marks, sgd)) == []


def test_an_optimizer_that_takes_whole_parameters() -> None:
    assert sent(check((2, 2), columns, by_class(Own, lr=0.1))) == []


def test_an_optimizer_over_divided_parameters_only() -> None:
    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)

    assert sent(check((2, 2), columns, some)) == [("all_reduce", "tp", 8)]


def test_a_language_model() -> None:
    assert sent(check((2, 2), language, sgd, GPT2)) == [("all_reduce", "tp", 8)]


def test_without_the_norms_collective_ranks_part() -> None:
    model, (batch,) = MLP_CASE.model(), MLP_CASE.batches(1)
    columns(model)
    step = cf.compile(
        model,
        loss_fn=MLP_CASE.loss_fn,
        optimizer=sgd(model),
        parallel_mode="semi_auto",
        mesh=(2, 2),
        device_num=4,
        full_batch=True,
        clip_grad_norm=LIMIT,
    )
    lowered = step.lower(*batch)
    (name,) = [info(node).name for node in lowered.program.collectives() if info(node).phase == "update"]
    assert cf.lockstep(lowered)(*batch).disagreement is None
    found = cf.lockstep(lowered, drop=[name])(*batch).disagreement
    assert found is not None and found.node == "update/wait.tp" and found.ranks == (0, 1)
