"""The comparison with one device must notice any single collective that is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import CONTRASTIVE, DIGITS, GPT2, WIDE, Case, shards
from tests.oracle import ACROSS_STEPS, APART_ACROSS_STEPS, OPTIMAL, SLOW, cluster, eager_gradients, make_world, sgd
from tests.passes.test_user_collectives import lockstep, make, one_device

pytestmark = pytest.mark.usefixtures("no_other_plan")

OFF = {"openstate": False}


def agrees(world: LockstepWorld, batches: Any, want: Mapping[str, torch.Tensor], drop: tuple[str, ...] = ()) -> bool:
    """Whether every rank has the gradients of one device."""
    return all(
        torch.allclose(result.grads[name], want[name], rtol=1e-8, atol=1e-10)
        for result in world(batches, drop=drop)
        for name in want
    )


def assert_every_collective_matters(world: LockstepWorld, batches: Any, want: Mapping[str, torch.Tensor]) -> int:
    names = world.collectives(batches[0])
    assert agrees(world, batches, want)
    for name in names:
        assert not agrees(world, batches, want, (name,)), f"dropping {name} went unnoticed"
    assert agrees(world, batches, want)
    return len(names)


@pytest.mark.parametrize(
    ("case", "comm_fusion", "count"),
    [
        pytest.param(DIGITS, None, 1, id="fused"),
        pytest.param(DIGITS, OFF, 14, id="unfused"),
        pytest.param(DIGITS, {"allreduce": {"mode": "index", "config": [3, 8]}}, 3, id="index"),
        pytest.param(CONTRASTIVE, OFF, 8, id="collectives-in-the-model"),
        pytest.param(GPT2, {"allreduce": {"mode": "index", "config": [2, 12]}}, 3, id="gpt2"),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_gradient_reduction(case: Case, comm_fusion: Any, count: int, world: int) -> None:
    model, (batch,) = case.model(), case.batches(1)
    want = eager_gradients(case, model, batch)
    ranks = make_world(case, model, world, None, comm_fusion)
    assert assert_every_collective_matters(ranks, shards(batch, world), want) == count


@pytest.mark.parametrize(("case", "least"), [(DIGITS, 2), (CONTRASTIVE, 5), (GPT2, 3)], ids=["digits", "user", "gpt2"])
@pytest.mark.parametrize("world", [2, 4])
def test_gradient_reduction_with_optimal_fusion(case: Case, least: int, world: int) -> None:
    model, (batch,) = case.model(), case.batches(1)
    want = eager_gradients(case, model, batch)
    ranks = make_world(case, model, world, None, OPTIMAL, cluster=SLOW)
    assert assert_every_collective_matters(ranks, shards(batch, world), want) >= least


# Its own collectives are urgent: only where messages are dear does it pay to let the gradients run on.
LATENT = {**ACROSS_STEPS, "cluster": cluster("latent", 1e-4, 1e7)}


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        *(pytest.param(case, ACROSS_STEPS, id=f"{case.name}-optimal") for case in (DIGITS, WIDE, GPT2)),
        *(pytest.param(case, APART_ACROSS_STEPS, id=f"{case.name}-unfused") for case in (DIGITS, WIDE)),
        pytest.param(CONTRASTIVE, LATENT, id="collectives-in-the-model"),
    ],
)
def test_a_reduction_that_the_next_step_waits_for(case: Case, plan: dict[str, Any]) -> None:
    """Dropped in the second of three steps: what the third one leaves in the parameters shows it."""
    batches = case.batches(3)

    def train(*drop: str) -> tuple[list[torch.Tensor], list[str]]:
        ranks = make_world(case, case.model(), 2, sgd, **plan)
        for number, batch in enumerate(batches):
            ranks(shards(batch, 2), drop=drop if number == 1 else ())
            assert ranks.is_pending
        params = [param.detach().clone() for each in ranks.models for param in each.parameters()]
        return params, ranks.collectives(shards(batches[0], 2)[0])

    want, names = train()
    for name in dict.fromkeys([names[0], names[len(names) // 2], names[-1]]):
        same = [torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(train(name)[0], want, strict=True)]
        assert not all(same), f"dropping {name} went unnoticed"


@pytest.mark.parametrize("comm_fusion", [None, OFF], ids=["fused", "unfused"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
def test_collectives_of_the_user(kind: str, comm_fusion: Any) -> None:
    model, batches = make(kind, 2)
    _, want = one_device(model, batches)
    assert assert_every_collective_matters(lockstep(model, 2, comm_fusion), batches, want) >= 3


def test_whole_step_with_a_dropped_reduction_leaves_ranks_apart() -> None:
    model, (batch,) = DIGITS.model(), DIGITS.batches(1)
    ranks = make_world(DIGITS, model, 2, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    (name,) = ranks.collectives(shards(batch, 2)[0])
    ranks(shards(batch, 2), drop=[name])
    first, second = (list(each.parameters()) for each in ranks.models)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
