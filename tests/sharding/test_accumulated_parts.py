"""Several calls for one update of a divided step, against one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from tests.models import GPT2, MLP, MLP_CASE, Case
from tests.oracle import MakeOptimizer, Own, assert_same_tensors, by_class, clip, sgd, tensors_of
from tests.sharding.divided_oracle import EXACT, SINGLE, Divided, Mark, divided, loss_of, no_marks

LIMIT = 0.05


class Penalised(nn.Module):
    """The loss has terms that do not depend on the batch: all ranks have the same gradient of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()
        self.alone = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        penalty = (self.alone**3).sum() + 0.1 * self.layers[0].weight.square().sum()
        return F.cross_entropy(self.layers(x), y) + penalty


PENALISED = Case("penalised", Penalised, MLP_CASE.batch, None)


def layers_of(model: nn.Module) -> Any:
    return getattr(model, "layers", model)


def columns(model: nn.Module) -> None:
    cf.shard(layers_of(model)[0], weight=("tp", None), bias=("tp",))
    cf.shard(layers_of(model)[2], weight=(None, "tp"))


def over_both_axes(model: nn.Module) -> None:
    """One weight over tp, one over the axis of the batch, and one over both."""
    for number, strategy in ((0, ("tp", None)), (2, ("dp", None)), (4, ("dp", "tp"))):
        cf.shard(layers_of(model)[number].weight, strategy)


def language(model: nn.Module) -> None:
    cf.shard(model.model, cf.plans.tensor_parallel(model.model, axis="tp"))


def check(case: Case, mesh: tuple[int, ...], mark: Mark, make: MakeOptimizer = sgd, **options: Any) -> Divided:
    """Two updates of two micro-batches each on all ranks, against one device."""
    model, batches = case.model(), case.batches(4)
    found = divided(case, copy.deepcopy(model), mesh, mark, make, accumulate_steps=2, **options)
    optimizer, limit = make(model), options.get("clip_grad_norm")
    for number, batch in enumerate(batches):
        (loss_of(case, model, batch, {}) / 2).backward()
        if number % 2:
            if limit is not None:
                clip(optimizer, limit)
            optimizer.step()
            optimizer.zero_grad()
        found.run(batch)
    for rank, mine in enumerate(found.world.models):
        tolerance = SINGLE if case is GPT2 else EXACT
        assert_same_tensors(tensors_of(mine), tensors_of(model), tolerance, f"rank {rank}: ")
    return found


def sent_early(found: Divided, case: Case) -> list[str]:
    """The collectives of the backward of a micro-batch that another one follows, which serve parameters."""
    args, kwargs = found._part(case.batches(1)[0], {}, 0, len(found.world.models))
    lowered = found.world.step.lower_micro_batch(*args, **kwargs)
    roles = [collective for node in lowered.program.collectives() if (collective := info(node).collective)]
    return [each.members[0] for each in roles if each.role == "gradient"]


MESHES: list[tuple[tuple[int, ...], Mark, int]] = [
    ((4,), no_marks, 0),
    ((4,), no_marks, 4),
    ((1, 2), no_marks, 0),
    ((2, 2), columns, 0),
    ((2, 2), columns, 2),
]


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize(
    ("mesh", "mark", "ways", "case"),
    [*((*each, PENALISED) for each in MESHES), (*MESHES[-1], MLP_CASE)],  # which is a part of the other one
)
def test_sums_over_the_batch_are_left_to_the_last_micro_batch(
    mesh: tuple[int, ...], mark: Mark, ways: int, case: Case, limit: float | None
) -> None:
    found = check(case, mesh, mark, ways=ways, clip_grad_norm=limit)
    assert sent_early(found, case) == []


@pytest.mark.parametrize("case", [MLP_CASE, PENALISED], ids=lambda case: case.name)
def test_a_weight_that_is_divided_along_with_the_batch(case: Case) -> None:
    """Its gradient is summed and divided at once, so each micro-batch does that."""
    check(case, (2, 2), over_both_axes)
    check(case, (2, 2), over_both_axes, clip_grad_norm=LIMIT, comm_fusion={"openstate": False})


@pytest.mark.parametrize("mark", [no_marks, columns])
def test_an_optimizer_that_takes_whole_parameters(mark: Mark) -> None:
    check(MLP_CASE, (2, 2), mark, by_class(Own, lr=0.1, momentum=0.9))


def test_a_language_model() -> None:
    assert sent_early(check(GPT2, (2, 2), language), GPT2) == []


def test_what_ranks_hold_of_gradients_is_as_large_as_their_parts() -> None:
    found = check(MLP_CASE, (2, 2), columns)
    (held, *_) = (rank.held for rank in found.world._ranks)
    shapes = {name: tuple(tensor.shape) for name, (_, tensor) in held._held.items()}
    assert shapes["0.weight"] == (8, 12) and shapes["0.bias"] == (8,) and shapes["2.weight"] == (16, 8)
