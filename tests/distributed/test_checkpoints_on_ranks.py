"""Checkpoints of several ranks: every byte once, equal training on other numbers of ranks and in other layouts."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from commfuse_fx.checkpoints import tensor_reader, tensor_writer
from commfuse_fx.runtime.ranks.exchange import ProcessExchange
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import adamw, assert_same, compiled, digest, mlp, snapshot, xy
from tests.sharding.elementwise import ACROSS, ONE_AXIS, TWO_AXES, Layouts, make_step, values
from tests.sharding.elementwise import batch as batch_of_parts

pytestmark = pytest.mark.dist


class Net(nn.Module):
    """Dropout, and statistics that each rank has of its own."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def train(step: cf.CompiledStep, numbers: range, rank: int | None = None, rows: int = 4) -> list[float]:
    return [float(step(*xy(number, rank, rows))) for number in numbers]


def saves_and_loads(folder: str, asynchronous: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Losses of a run that is saved, and of another one that goes on from there."""
    model = Net()
    optimizer = adamw(model)
    step = compiled(model, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(5 + dist.get_rank())
    for number in range(3):
        step(*xy(number))
        scheduler.step()
    session = step.session
    assert session.running is not None and session.running.tail.is_pending == ("schedule" in options)
    extra = {"scheduler": scheduler, "data": data, "mine": {"rank": dist.get_rank()}, "all": torch.arange(5)}
    saving = step.save(folder, extra, asynchronous=asynchronous)
    want = train(step, range(3, 6))
    saving.wait()

    torch.manual_seed(77)
    other = Net()
    others = adamw(other)
    again = compiled(other, others, **options)
    rest = again.load(folder, {"scheduler": torch.optim.lr_scheduler.StepLR(others, 2), "data": data})
    assert rest.pop("all").tolist() == [0, 1, 2, 3, 4]
    assert train(again, range(3, 6)) == want and again.steps == 6
    assert_same(snapshot(other, others), snapshot(model, optimizer))
    assert len(set(want)) == 3
    return {"rest": rest, "mean": model.layers[1].running_mean.tolist()}


@pytest.mark.parametrize("options", [{}, ACROSS], ids=["", "across"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_same_bits_on_as_many_ranks(
    ranks: Ranks, tmp_path: Path, asynchronous: bool, options: dict[str, Any]
) -> None:
    found = ranks.values(saves_and_loads, str(tmp_path / "kept"), asynchronous, options)
    assert [each["rest"] for each in found] == [{"mine": {"rank": 0}}, {"mine": {"rank": 1}}]
    assert found[0]["mean"] != found[1]["mean"]  # of the batch norm, which each rank has of its own
    index = json.loads((tmp_path / "kept" / "commfuse.json").read_text())
    of_other_rank = [name for name in index["tensors"] if name.endswith("@1")]
    assert "model/layers.1.running_mean@1" in of_other_rank and "random/cpu/0@1" in of_other_rank
    assert not [name for name in of_other_rank if "weight" in name or "exp_avg" in name or name.startswith("extra/all")]
    assert os.listdir(tmp_path) == ["kept"]


def saves_wide(folder: str) -> int:
    model = mlp(256)
    step = compiled(model, adamw(model))
    train(step, range(2))
    step.save(folder)
    return sum(param.nbytes for param in model.parameters())


def test_each_rank_writes_as_much(ranks: Ranks, tmp_path: Path) -> None:
    nbytes = ranks.values(saves_wide, str(tmp_path / "kept"), size=3)[0]
    sizes = [(tmp_path / "kept" / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert 3 * nbytes < sum(sizes) < 3.2 * nbytes + 60_000 and max(sizes) < 1.2 * min(sizes)


# On other numbers of ranks, and divided otherwise


ROWS = 12
"""Of a batch of all ranks, which 1, 2, 3 and 4 ranks divide."""


def batches(world: int, numbers: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of batches that all worlds have in common."""
    return [tuple(each.chunk(world)[dist.get_rank()] for each in xy(number, 0, ROWS)) for number in numbers]


def goes_on(folder: str, made: Callable[..., cf.CompiledStep], saves: bool, whole: bool = False) -> list[float]:
    """Losses of the global batches, of a run that saves after two steps or goes on from there."""
    step, world = made(), 1 if whole else dist.get_world_size()
    losses = []
    if saves:
        for batch in batches(world, range(2)) if not whole else [xy(number, 0, ROWS) for number in range(2)]:
            step(*batch)
        step.save(folder, {"world": dist.get_world_size()})
    else:
        step.load(folder)
    assert step.steps == 2
    for batch in batches(world, range(2, 6)) if not whole else [xy(number, 0, ROWS) for number in range(2, 6)]:
        loss = step(*batch).double()
        if not whole:
            dist.all_reduce(loss)
            loss /= world
        losses.append(float(loss))
    return losses


def data_parallel() -> cf.CompiledStep:
    model = mlp()
    return compiled(model, adamw(model))


def divided_by_tp(mesh: tuple[int, int] = (1, 2), **more: Any) -> cf.CompiledStep:
    model = mlp()
    cf.shard(model[0], weight=("tp", None))
    cf.shard(model[2], weight=(None, "tp"))
    options = {"parallel_mode": "semi_auto", "mesh": mesh, "full_batch": True, **more}
    return compiled(model, adamw(model), **options)


def divided_by_dp() -> cf.CompiledStep:
    return divided_by_tp((2, 1))


def on_four(level: int = 0) -> cf.CompiledStep:
    config = {"parallel_optimizer_threshold": 0, "level": level}
    shared = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config} if level else {}
    return divided_by_tp((2, 2), **shared)


def rows_of_parts() -> cf.CompiledStep:
    """Two ranks share the update of what two others have another part of."""
    return on_four(1)


def rows_of_parts_alone() -> cf.CompiledStep:
    return on_four(3)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (3, 4), (4, 1)])
def test_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    want = ranks.values(goes_on, str(tmp_path), data_parallel, True, size=before)
    have = ranks.values(goes_on, str(tmp_path), data_parallel, False, size=after)
    for losses in have:
        assert losses == pytest.approx(want[0], rel=1e-5)


def test_in_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """From (2, 1) to (1, 2), to four ranks, to data parallel, to one rank and back."""
    want = ranks.values(goes_on, str(tmp_path / "0"), divided_by_dp, True, True)[0]
    for made, size, whole in (
        (divided_by_tp, 2, True),
        (on_four, 4, True),
        (data_parallel, 2, False),
        (data_parallel, 1, True),
    ):
        for losses in ranks.values(goes_on, str(tmp_path / "0"), made, False, whole, size=size):
            assert losses == pytest.approx(want, rel=1e-5)
    for made, size, boxes in (
        (divided_by_tp, 2, (2, 2)),
        (rows_of_parts, 4, (2, 4)),
        (rows_of_parts_alone, 4, (4, 4)),
    ):
        folder = tmp_path / made.__name__
        ranks.values(goes_on, str(folder), made, True, True, size=size)
        tensors = json.loads((folder / "commfuse.json").read_text())["tensors"]
        names = "model/0.weight", "optimizer/state/0.weight/exp_avg"
        assert tuple(len(tensors[name]["boxes"]) for name in names) == boxes
        for other, size_after in ((divided_by_dp, 2), (data_parallel, 2), (rows_of_parts, 4), (rows_of_parts_alone, 4)):
            whole = other is not data_parallel
            for losses in ranks.values(goes_on, str(folder), other, False, whole, size=size_after):
                assert losses == pytest.approx(want, rel=1e-5)


def parts_stay_parts(
    folder: str, layouts: Layouts, mesh: tuple[int, ...], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Nothing is gathered for a save, nor for a load into a step that has its parts already. What was saved."""

    def run(step: cf.CompiledStep, numbers: range) -> list[float]:
        data = step.mesh.index("dp", cf.get_rank())
        return [float(step(batch_of_parts(number, data))) for number in numbers]

    step = make_step(layouts, mesh, virtual=False, **options)
    run(step, range(2))
    with patch.object(ProcessExchange, "gather", side_effect=AssertionError("gathered")):
        step.save(folder)
        want = run(step, range(2, 5))
        other = make_step(layouts, mesh, virtual=False, **options)
        run(other, range(7, 8))
        other.load(folder)
        assert run(other, range(2, 5)) == want
    fresh = make_step(layouts, mesh, virtual=False, **options)
    fresh.load(folder)
    saved = values(fresh.model, fresh.optimizer)
    assert run(fresh, range(2, 5)) == want
    for each in (other, fresh):
        assert_same(values(each.model, each.optimizer), values(step.model, step.optimizer))
    return saved


def whole_of_parts(folder: str) -> dict[str, torch.Tensor]:
    """What one rank reads of them."""
    step = make_step({}, (1,), virtual=False)
    step.load(folder)
    return values(step.model, step.optimizer)


@pytest.mark.parametrize(
    ("layouts", "mesh", "options"),
    [(ONE_AXIS, (1, 2), {}), (ONE_AXIS, (2, 2), ACROSS), (TWO_AXES, (1, 2, 2), {})],
    ids=["two", "across", "four"],
)
def test_parts_stay_parts(
    ranks: Ranks, tmp_path: Path, layouts: Layouts, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    size = torch.Size(mesh).numel()
    found = ranks.values(parts_stay_parts, str(tmp_path / "kept"), layouts, mesh, options, size=size)
    index = json.loads((tmp_path / "kept" / "commfuse.json").read_text())
    tensors = index["tensors"]
    assert len(tensors["model/b"]["boxes"]) == (6 if layouts is ONE_AXIS else 12)
    assert len(tensors["optimizer/state/b/exp_avg"]["boxes"]) == len(tensors["model/b"]["boxes"])
    found += ranks.values(whole_of_parts, str(tmp_path / "kept"), size=1)
    for each in found[1:]:
        assert_same(each, found[0])


def layerwise(folder: str) -> str:
    """In hybrid_parallel each rank has its own values of what the user divides."""

    def made() -> tuple[nn.Module, cf.CompiledStep]:
        model = mlp()
        model[0].weight.layerwise_parallel = True
        return model, compiled(model, adamw(model), parallel_mode="hybrid_parallel")

    model, step = made()
    if dist.get_world_size() == 1:
        try:
            step.load(folder)
        except cf.CheckpointError as error:
            return str(error)
    train(step, range(2))
    step.save(folder)
    want = train(step, range(2, 4))
    other, again = made()
    again.load(folder)
    assert train(again, range(2, 4)) == want
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    return digest(model)


def test_what_each_rank_has_of_a_model_that_the_user_divides(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks.values(layerwise, str(tmp_path / "kept"))
    assert one != other
    (said,) = ranks.values(layerwise, str(tmp_path / "kept"), size=1)
    assert "each rank has its own 0.weight (layerwise_parallel), and there were 2 ranks" in said


# One rank fails and all go on


def fails_on_one_rank(folder: str, what: str) -> str:
    """Rank 1 fails. Returns the error; afterwards training goes on as if nothing had been tried."""
    model, twin = mlp(), mlp()
    optimizer, others = adamw(model), adamw(twin)
    step, plain = compiled(model, optimizer), compiled(twin, others)
    train(step, range(2))
    train(plain, range(2))
    step.save(folder, {"number": 1})
    is_bad, error = dist.get_rank() == 1, ""
    extra = {"bad": object()} if is_bad and what == "extra" else None
    place = folder if not (is_bad and what == "folder") else f"{folder}/elsewhere"
    before, random = snapshot(model, optimizer), torch.get_rng_state()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with patch.object(tensor_writer, "write_share", full if is_bad and what == "full" else tensor_writer.write_share):
        try:
            if what == "read":
                with patch.object(tensor_reader, "read_parts", full if is_bad else tensor_reader.read_parts):
                    step.load(folder)
            elif what == "asynchronous":
                with patch.object(tensor_writer, "write_share", full if is_bad else tensor_writer.write_share):
                    saving = step.save(place, asynchronous=True)
                    train(step, range(2, 3))
                    train(plain, range(2, 3))
                    before = snapshot(model, optimizer)
                    saving.wait()
            else:
                step.save(place, extra)
        except cf.CommFuseError as caught:
            error = f"{type(caught).__name__}: {caught}"
    assert_same(snapshot(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert train(step, range(3, 5)) == train(plain, range(3, 5))
    step.save(folder, {"number": 2})
    return error


@pytest.mark.parametrize(
    ("what", "own", "told"),
    [
        ("extra", "CheckpointError: extra/values/bad is <object", "PeerFailedError: another rank failed in step.save("),
        ("full", "CheckpointError: step.save(", "PeerFailedError: another rank failed in step.save("),
        ("asynchronous", "CheckpointError: step.save(", "PeerFailedError: another rank failed in step.save("),
        ("read", "CheckpointError: the checkpoint in ", "PeerFailedError: another rank failed in step.load("),
        ("folder", "PlanMismatchError: ranks 0 and 1 called different", "PlanMismatchError: ranks 0 and 1 called dif"),
    ],
)
def test_one_rank_fails_and_all_go_on(ranks: Ranks, tmp_path: Path, what: str, own: str, told: str) -> None:
    good, bad = run_soon(ranks, fails_on_one_rank, str(tmp_path / "kept"), what)
    assert good.ok and bad.ok, good.details + bad.details
    assert bad.value.startswith(own), bad.value
    assert good.value.startswith(told) and (bad.value in good.value), good.value
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def interrupted(folder: str) -> str:
    """Ctrl-C on rank 1 while all write."""
    model = mlp()
    step = compiled(model, adamw(model))
    train(step, range(1))
    step.save(folder, {"number": 1})

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with patch.object(tensor_writer, "write_share", stop if dist.get_rank() else tensor_writer.write_share):
        try:
            step.save(folder, {"number": 2})
        except cf.CollectiveError as error:
            return str(error)
    return ""


def test_ctrl_c_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    one, other = run_soon(ranks, interrupted, str(tmp_path / "kept"))
    assert other.error == "KeyboardInterrupt: "
    assert one.ok and "failed. Another rank has died, is stuck or left early" in one.value
    assert os.listdir(tmp_path) == ["kept"]
    assert ranks.values(loads_number, str(tmp_path / "kept")) == [1, 1]


def loads_number(folder: str) -> int:
    model = mlp()
    return int(compiled(model, adamw(model)).load(folder)["number"])


def loads_while_a_save_runs(folder: str) -> list[float]:
    """The ranks meet for the one thing, and then for the other."""
    model = mlp()
    step = compiled(model, adamw(model))
    train(step, range(2))
    state = copy.deepcopy(step.state_dict())
    want = train(step, range(2, 5))
    real = tensor_writer.write_share

    def slow(*args: Any) -> Any:
        time.sleep(0.3 * (1 + dist.get_rank()))
        return real(*args)

    for act in (lambda: step.load_state_dict(state), lambda: step.load(folder)):
        step.load_state_dict(state)
        with patch.object(tensor_writer, "write_share", slow):
            saving = step.save(folder, asynchronous=True)
            act()
        assert saving.is_done
        assert train(step, range(2, 5)) == want
    return want


def test_a_load_waits_for_a_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(loads_while_a_save_runs, str(tmp_path / "kept"))


# The end of a program


def ends_at_once(folder: str) -> None:
    model = mlp()
    step = compiled(model, adamw(model))
    train(step, range(2))
    step.save(folder, {"number": 7}, asynchronous=True)
    dist.destroy_process_group()
    assert os.path.exists(f"{folder}/commfuse.json")


def test_the_end_of_a_world_waits_for_a_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(ends_at_once, str(tmp_path / "kept"))
    assert ranks.values(loads_number, str(tmp_path / "kept")) == [7, 7]


def two_models(folder: str) -> list[float]:
    """The step of another model is an extra like any other."""
    steps = [data_parallel(), compiled(net := Net(0.0), adamw(net))]
    for step in steps:
        train(step, range(2))
    steps[0].save(folder, {"other": steps[1]})
    want = [loss for step in steps for loss in train(step, range(2, 4))]
    again = [data_parallel(), compiled(net := Net(0.0), adamw(net))]
    again[0].load(folder, {"other": again[1]})
    assert [loss for step in again for loss in train(step, range(2, 4))] == want
    assert copy.deepcopy(want) == want
    return want


def test_steps_of_two_models(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(two_models, str(tmp_path / "kept"))
