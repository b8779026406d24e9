"""The state of a step on several ranks: parts are put back as parts, and a load changes all ranks or none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks, hurry, run_soon
from tests.distributed.models_of_ranks import adamw, assert_same, compiled, mlp, snapshot, xy
from tests.sharding.elementwise import ACROSS, ONE_AXIS, TWO_AXES, Layouts, batch, make_step, values

pytestmark = pytest.mark.dist


def train_parts(step: cf.CompiledStep, numbers: range) -> list[float]:
    data = step.mesh.index("dp", cf.get_rank())
    return [float(step(batch(number, data))) for number in numbers]


def goes_back(layouts: Layouts, mesh: tuple[int, ...], optimizer: str, steps: int, options: Any) -> list[bool]:
    """A state is loaded into the step that it is from, and into another one. Whether parts stayed divided."""
    step = make_step(layouts, mesh, optimizer, virtual=False, **options)
    train_parts(step, range(steps))
    state = copy.deepcopy(step.state_dict())
    want = train_parts(step, range(steps, 5))
    stayed = []
    for _ in range(2):
        shards = step.session.runners.executors.shards
        assert shards is not None and shards.is_divided
        step.load_state_dict(state)
        stayed.append(shards.is_divided)
        assert step.steps == steps
        assert train_parts(step, range(steps, 5)) == want
    other = make_step(layouts, mesh, optimizer, virtual=False, **options)
    other.load_state_dict(state)
    assert train_parts(other, range(steps, 5)) == want
    assert_same(values(other.model, other.optimizer), values(step.model, step.optimizer))
    return stayed


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
def test_divided_parameters_stay_divided(ranks: Ranks, optimizer: str, steps: int) -> None:
    assert ranks.values(goes_back, ONE_AXIS, (1, 2), optimizer, steps, {}) == [[True, True]] * 2


def test_on_a_mesh_and_across_steps(ranks: Ranks) -> None:
    assert ranks.values(goes_back, TWO_AXES, (1, 2, 2), "adamw", 2, {}, size=4) == [[True, True]] * 4
    assert ranks.values(goes_back, ONE_AXIS, (2, 2), "momentum", 2, ACROSS, size=4) == [[True, True]] * 4


def state_of_gone() -> None:
    """What a load takes out of the optimizer can no longer be read."""
    step = make_step(ONE_AXIS, (1, 2), "momentum", virtual=False)
    state = copy.deepcopy(step.state_dict())
    train_parts(step, range(2))
    kept = step.optimizer.state[step.model.a]["momentum_buffer"]
    step.load_state_dict(state)
    assert not step.optimizer.state[step.model.a]
    with pytest.raises(cf.CommFuseError, match="so its values are gone"):
        kept.sum()
    train_parts(step, range(2))


def test_states_that_a_load_removes(ranks: Ranks) -> None:
    ranks.values(state_of_gone)


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """One that a rank may hand to another one."""
    return copy.deepcopy(state)


def one_bad_state() -> str:
    """Rank 1 has the state of another model."""
    model = mlp()
    optimizer = adamw(model)
    step = compiled(model, optimizer)
    step(*xy(0))
    state = whole_state(step.state_dict())
    step(*xy(1))
    before, error = snapshot(model, optimizer), ""
    if cf.get_rank():
        del state["model"]["0.bias"]
    try:
        step.load_state_dict(state)
    except cf.CommFuseError as caught:
        error = f"{type(caught).__name__}: {caught}"
    assert_same(snapshot(model, optimizer), before)
    assert step.steps == 2
    loss = float(step(*xy(2)))
    model = mlp()
    other = compiled(model, adamw(model))
    assert [float(other(*xy(number))) for number in range(3)][-1] == loss
    return error


def test_one_bad_state_changes_nothing_on_any_rank(ranks: Ranks) -> None:
    good, bad = run_soon(ranks, one_bad_state)
    assert good.ok and bad.ok, good.details + bad.details
    assert bad.value.startswith("CheckpointError: ") and "missing in the checkpoint: 0.bias" in bad.value
    assert good.value.startswith("PeerFailedError: another rank failed in step.load_state_dict()")
    assert bad.value in good.value


def one_loads_alone() -> str:
    model = mlp()
    step = compiled(model, adamw(model))
    step(*xy(0))
    state, error = whole_state(step.state_dict()), ""
    try:
        if cf.get_rank():
            step.load_state_dict(state)
        else:
            step(*xy(1))
    except cf.PlanMismatchError as caught:
        error = str(caught)
    step.load_state_dict(state)
    step(*xy(1))
    return error


def test_a_rank_that_loads_while_others_train(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, one_loads_alone):
        assert outcome.ok, outcome.details
        assert outcome.value == (
            "ranks 0 and 1 called different methods of a step\n  rank 0: the step\n  rank 1: step.load_state_dict()\n"
            "All ranks call them together, with the same arguments, and between the same steps."
        )


def leaves() -> None:
    model = mlp()
    step = compiled(model, adamw(model))
    step(*xy(0))
    hurry(4.0)
    if cf.get_rank():
        raise SystemError("this rank has other plans")
    step.load_state_dict(step.state_dict())


def test_a_rank_that_never_loads(ranks: Ranks) -> None:
    one, other = ranks.run(leaves)
    assert other.error == "SystemError: this rank has other plans"
    assert one.error.startswith("CollectiveError: ") and one.seconds < 20


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def draws_the_same_masks() -> tuple[list[float], list[float]]:
    """Losses of a divided graph with dropout: unbroken, and of a step that goes on from a state of it."""

    def made() -> cf.CompiledStep:
        model = Dropped()
        cf.shard(model.layers[0], weight=("tp", None))
        options = {"loss_fn": F.cross_entropy, "optimizer": adamw(model), "full_batch": True}
        return cf.compile(model, parallel_mode="semi_auto", mesh=(1, 2), **options)

    step = made()
    for number in range(2):
        step(*xy(number, 0))
    state = copy.deepcopy(step.state_dict())
    want = [float(step(*xy(number, 0))) for number in range(2, 5)]
    torch.manual_seed(7)
    other = made()
    other(*xy(0, 0))
    other.load_state_dict(state)
    return want, [float(other(*xy(number, 0))) for number in range(2, 5)]


def test_the_seeds_of_a_divided_graph_go_on(ranks: Ranks) -> None:
    for want, have in ranks.values(draws_the_same_masks):
        assert have == want and len(set(want)) == 3
