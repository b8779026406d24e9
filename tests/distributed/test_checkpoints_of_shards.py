"""Checkpoints of steps whose ranks share the update: each rank writes its rows, and any sharding goes on from them."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.checkpoints import tensor_reader, tensor_writer
from commfuse_fx.runtime.ranks.exchange import ProcessExchange
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import assert_same
from tests.distributed.test_parallel_optimizer import batch, model
from tests.frontends.test_step_state import Mixed

pytestmark = pytest.mark.dist

LEVELS: dict[str, dict[str, Any] | None] = {
    "level 1": {"parallel_optimizer_threshold": 0, "pad": True},
    "level 1, no padding": {"parallel_optimizer_threshold": 0},
    "level 2": {"parallel_optimizer_threshold": 0, "pad": True, "level": 2},
    "level 2, large ones": {"parallel_optimizer_threshold": 2, "level": 2},
    "level 3": {"parallel_optimizer_threshold": 0, "pad": True, "level": 3},
    "owners": {"parallel_optimizer_threshold": 0, "mode": "broadcast"},
    "plain": None,
}
ACROSS: dict[str, Any] = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"}


def make(level: str, **options: Any) -> cf.CompiledStep:
    net, config = model(), LEVELS[level]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    shared = {} if config is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    return cf.compile(net, loss_fn=F.cross_entropy, optimizer=optimizer, **shared, **options)


def run(step: cf.CompiledStep, numbers: range) -> list[float]:
    return [float(step(*batch(number))) for number in numbers]


def state_of(step: cf.CompiledStep) -> Any:
    return copy.deepcopy(step.state_dict())


def rows_stay_rows(folder: str, level: str, options: dict[str, Any]) -> Any:
    """Nothing is gathered for a save, nor for a load into a step that has its rows already. What was saved.

    Files are written when the step has gone on.
    """
    step, other, fresh = (make(level, **options) for _ in range(3))
    run(step, range(2))
    run(other, range(7, 8))
    has_gone_on, write = threading.Event(), tensor_writer.write_share

    def late(*args: Any) -> Any:
        assert has_gone_on.wait(60)
        return write(*args)

    with patch.object(ProcessExchange, "gather", side_effect=AssertionError("gathered")):
        with patch.object(tensor_writer, "write_share", late):
            saving = step.save(folder, asynchronous=True)
            want = run(step, range(2, 5))
            has_gone_on.set()
            saving.wait()
        for each in (other, fresh):
            with patch.object(tensor_reader, "read_parts", wraps=tensor_reader.read_parts) as read:
                each.load(folder)
            place = read.call_args.args[2]["optimizer/state/0.weight/exp_avg"]
            rows = 13 if level != "owners" else 26 if place.boxes else 0
            assert place.part == ((rows, 12) if each is other else (26, 12))
            shards = each.session.runners.executors.shards
            assert (shards is not None and shards.is_divided) == (each is other)
            assert run(each, range(2, 5)) == want
    states = [state_of(each) for each in (step, other, fresh)]
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])
    other.load_state_dict(states[0])  # which gathering has made whole
    run(other, range(5, 6))
    other.load_state_dict(states[0])  # which is divided
    assert run(other, range(5, 7)) == run(step, range(5, 7))
    fresh.load(folder)
    return state_of(fresh)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, ACROSS], ids=["clipped", "across steps"])
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "plain"])
def test_rows_stay_rows(ranks: Ranks, tmp_path: Path, level: str, options: dict[str, Any]) -> None:
    saved = ranks.values(rows_stay_rows, str(tmp_path / "kept"), level, options)
    assert_same(saved[1], saved[0])
    tensors = json.loads((tmp_path / "kept" / "commfuse.json").read_text())["tensors"]
    whole = level in ("level 1, no padding", "level 2, large ones", "owners")
    for name, count in (("0.weight", 1 if level == "owners" else 2), ("2.weight", 1 if whole else 2)):
        assert len(tensors[f"optimizer/state/{name}/exp_avg"]["boxes"]) == count
        assert len(tensors[f"model/{name}"]["boxes"]) == (2 if level == "level 3" else 1)


def goes_on(folder: str, level: str, saves: bool) -> tuple[list[float], Any]:
    step = make(level)
    if saves:
        run(step, range(2))
        step.save(folder)
    else:
        step.load(folder)
    saved = state_of(step)
    losses = torch.tensor(run(step, range(2, 5)))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist(), saved


@pytest.mark.parametrize("before", LEVELS)
def test_another_sharding_goes_on(ranks: Ranks, tmp_path: Path, before: str) -> None:
    (want, saved), _, _ = ranks.values(goes_on, str(tmp_path), before, True, size=3)
    for after in ("level 1", "level 3", "owners", "plain"):
        for losses, state in ranks.values(goes_on, str(tmp_path), after, False, size=3):
            assert losses == pytest.approx(want, rel=1e-12)
            assert_same(state, saved)
    for _, state in ranks.values(goes_on, str(tmp_path), "level 1", False, size=2):
        assert_same(state, saved)


def of_strange_parameters(folder: str, before: str, after: str) -> None:
    """Tied, frozen and scalar ones, rows that do not divide, two groups, buffers and dropout."""

    def made(level: str) -> cf.CompiledStep:
        torch.manual_seed(0)
        net = Mixed(13).double()
        net.norm.weight.requires_grad_(False)
        captures.share(net, Mixed, any_mesh=True)
        groups = [{"params": [*net.first.parameters()]}, {"params": [net.tied.weight, net.scale], "lr": 3e-3}]
        config = LEVELS[level]
        shared = {} if config is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, **shared)

    def train(step: cf.CompiledStep, numbers: range) -> list[float]:
        return [float(step(x := torch.randn(6, 6).double(), x.flip(1))) for _ in numbers]

    step, other = made(before), made(after)
    torch.manual_seed(3 + dist.get_rank())
    train(step, range(2))
    step.save(folder)
    saved = state_of(step)
    want = train(step, range(3))
    train(other, range(1))
    other.load(folder)
    assert_same(state_of(other), saved)
    assert train(other, range(3)) == pytest.approx(want, rel=0 if before == after else 1e-12)


@pytest.mark.parametrize("after", ["level 1", "level 3", "owners"])
@pytest.mark.parametrize("before", ["level 1", "level 3", "owners"])
def test_strange_parameters(ranks: Ranks, tmp_path: Path, before: str, after: str) -> None:
    ranks.values(of_strange_parameters, str(tmp_path / "kept"), before, after)


def fails_elsewhere(folder: str, level: str) -> str:
    """Rank 1 cannot read. Nothing has changed on any rank, and training goes on as if nobody had tried."""
    step, twin = make(level), make(level)
    for each in (step, twin):
        run(each, range(2))
    step.save(folder)
    for each in (step, twin):
        run(each, range(2, 4))

    def unreadable(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    error = ""
    with patch.object(tensor_reader, "read_parts", unreadable if dist.get_rank() else tensor_reader.read_parts):
        try:
            step.load(folder)
        except cf.CommFuseError as caught:
            error = f"{type(caught).__name__}: {caught}"
    shards = step.session.runners.executors.shards
    assert step.steps == 4 and shards is not None and shards.is_divided
    assert run(step, range(4, 6)) == run(twin, range(4, 6))
    assert_same(state_of(step), state_of(twin))
    return error


@pytest.mark.parametrize("level", ["level 1", "level 3", "owners"])
def test_a_load_that_fails_on_one_rank(ranks: Ranks, tmp_path: Path, level: str) -> None:
    good, bad = ranks.values(fails_elsewhere, str(tmp_path / "kept"), level)
    assert bad.startswith("CheckpointError: the checkpoint in ") and "Input/output error" in bad
    assert good.startswith("PeerFailedError: another rank failed in step.load(")
