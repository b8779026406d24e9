"""Ranks that have other values, or other checkpoints, than each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.checkpoints import folders
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import adamw, assert_same, compiled, mlp, snapshot, xy

pytestmark = pytest.mark.dist


def of_own_seed(seed: int, sends: bool) -> cf.CompiledStep:
    """sends: whether rank 0 sends its parameters in the first step."""
    model = mlp(seed=seed + cf.get_rank())
    return compiled(model, adamw(model), parameter_broadcast=sends)


def saves_what_differs(folder: str, sends: bool) -> list[torch.Tensor]:
    step = of_own_seed(1, sends)
    if not sends:
        step(*xy(9))
    begin = snapshot(step.model)[0]
    step.save(folder)
    other = of_own_seed(7, sends)
    other.load(folder)
    assert_same(snapshot(other.model)[0], begin)
    want = [float(step(*xy(number))) for number in range(3)]
    assert [float(other(*xy(number))) for number in range(3)] == want
    assert_same(snapshot(other.model, other.optimizer), snapshot(step.model, step.optimizer))
    return list(begin.values())


def goes_on_alone(folder: str) -> list[torch.Tensor]:
    step = of_own_seed(7, True)
    step.load(folder)
    return list(snapshot(step.model)[0].values())


@pytest.mark.parametrize("sends", [True, False])
def test_ranks_that_begin_with_different_parameters(ranks: Ranks, tmp_path: Path, sends: bool) -> None:
    """Before rank 0 sends its own, or for good: each goes on with its own, and a single rank with those of rank 0."""
    one, other = ranks.values(saves_what_differs, f"{tmp_path}/kept", sends)
    assert not torch.equal(one[0], other[0])
    (alone,) = ranks.values(goes_on_alone, f"{tmp_path}/kept", size=1)
    assert_same(alone, one)


def loads_others(folder: str) -> str:
    """Each rank finds what the other one does not: folders of their own, or a save between their reads."""
    model = mlp()
    optimizer = adamw(model)
    step = compiled(model, optimizer)
    for name in ("0", "1"):
        step.save(f"{folder}/{name}")
        step(*xy(0))
    before, error = snapshot(model, optimizer), ""
    mine = f"{folder}/{cf.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "commfuse_fx.checkpoints.checkpoint_reader.CheckpointFolder", lambda _: folders.CheckpointFolder(mine)
        )
        try:
            step.load(folder)
        except cf.CheckpointError as caught:
            error = str(caught)
    assert_same(snapshot(model, optimizer), before)
    assert step.steps == 2
    step.load(f"{folder}/0")
    assert step.steps == 0
    return error


def test_ranks_that_find_different_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in run_soon(ranks, loads_others, str(tmp_path)):
        assert outcome.ok, outcome.details
        assert "ranks 0 and 1 have found different checkpoints there, and nothing is loaded" in outcome.value
