"""The lockstep world itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.collectives import is_wait
from commfuse_fx.lockstep import LockstepWorld
from tests.models import MLP_CASE, shards
from tests.oracle import assert_same, make_world, sgd, train_reference


def test_one_result_per_rank() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 4)
    results = world(shards(batch, 4))
    assert len(results) == len(world.models) == len(world.optimizers) == 4
    assert all(result.grads.keys() == dict(world.models[0].named_parameters()).keys() for result in results)
    with_optimizer = make_world(MLP_CASE, MLP_CASE.model(), 4, sgd)(shards(batch, 4))
    assert all(not result.grads for result in with_optimizer)


def test_evaluation_changes_nothing() -> None:
    (batch,) = MLP_CASE.batches(1)
    model = MLP_CASE.model()
    world = make_world(MLP_CASE, model, 2, sgd)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for each in world.models:
        each.eval()
    losses = [result.loss for result in world(shards(batch, 2))]
    torch.testing.assert_close(torch.stack(losses).mean(), F.cross_entropy(model(batch[0]), batch[1]).detach())
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_other_shapes_are_traced_anew_and_share_the_state() -> None:
    model = MLP_CASE.model()
    batches = [*MLP_CASE.batches(2, rows=8), *MLP_CASE.batches(1, rows=4), *MLP_CASE.batches(1, rows=8)]
    want = train_reference(MLP_CASE, model, batches, 2, sgd)
    world = make_world(MLP_CASE, model, 2, sgd)
    for batch in batches:
        world(shards(batch, 2))
    assert_same(world.models, want)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.5, self.training).square().mean()


def test_ranks_and_steps_draw_their_own_random_numbers() -> None:
    x = torch.randn(4, 12)

    def losses() -> list[float]:
        torch.manual_seed(0)
        world = LockstepWorld(cf.compile(Dropping(), device_num=2, global_rank=0))
        return [float(result.loss) for _ in range(2) for result in world([(x,), (x,)])]

    first = losses()
    assert len(set(first)) == 4
    assert losses() == first


def test_what_is_read_before_its_wait_is_poisoned() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2)
    parts = shards(batch, 2)
    program = world.step.lower(*parts[0])._program
    for wait in [node for node in program.graph.nodes if is_wait(node)]:
        wait.replace_all_uses_with(wait.args[0])
        program.graph.erase_node(wait)
    assert all(bool(grad.isnan().all()) for result in world(parts) for grad in result.grads.values())


def test_bad_arguments() -> None:
    (batch,) = MLP_CASE.batches(1)
    world = make_world(MLP_CASE, MLP_CASE.model(), 2)
    parts = shards(batch, 2)
    with pytest.raises(cf.ConfigValueError, match="3 batches for 2 ranks"):
        world([*parts, parts[0]])
    with pytest.raises(cf.ConfigValueError, match=r"rank 1 .*float64\[4, 12\] to .*float64\[8, 12\]"):
        world([parts[0], batch])
    with pytest.raises(cf.ConfigValueError, match="'nonsense' is not a collective"):
        world(parts, drop=["nonsense"])
