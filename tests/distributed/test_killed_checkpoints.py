"""Ranks that are killed while they save or train: a restart goes on from the last checkpoint with the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.checkpoints import folders, tensor_writer
from commfuse_fx.runtime.execute.wire import messages
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw
from tests.distributed.programs import Ended, run_and_leave, run_programs
from tests.distributed.quick_trials import quickly

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parent.parent.parent
EVERY = 4
"""Steps between two checkpoints."""


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(folder: Path, *_: Any) -> Any:
    (folder / f"__{cf.get_rank()}_0.distcp").write_bytes(b"PK\3\4 and so on")
    kill()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 512), nn.Linear(512, 4))


def train(folder: str, steps: int, options: dict[str, Any], deaths: dict[int, tuple[str, Sequence[int]]]) -> None:
    """A training loop that goes on from a checkpoint if there is one, and writes down its losses.

    deaths: at which step of the loop something kills these ranks.
    """
    cf.init(timeout=60)
    rank, kept = cf.get_rank(), Path(folder) / "kept"
    model = net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = torch.Generator().manual_seed(rank)
    torch.manual_seed(3)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, **options)
    extra = {"scheduler": scheduler, "data": data}
    if kept.exists():
        step.load(kept, extra)
    with ExitStack() as killing:
        for number in range(step.steps, steps):
            what, ranks = deaths.get(number, ("", ()))
            dies = rank in ranks and what
            if dies == "step":
                kill()
            if dies == "update":  # ranks have voted, and the others wait for what this one has updated
                killing.enter_context(pytest.MonkeyPatch.context()).setattr(messages, "all_gather_single", kill)
            batch = torch.randn(4, 16, generator=data), torch.randint(0, 4, (4,), generator=data)
            loss = float(step(*batch))
            scheduler.step()
            with open(f"{folder}/{rank}.losses", "a") as file:
                file.write(json.dumps([number, loss]) + "\n")
            if dies in ("write", "write asynchronously"):
                patch = killing.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(tensor_writer, "write_share", half_written)
            elif dies == "complete":
                killing.enter_context(pytest.MonkeyPatch.context()).setattr(folders.CheckpointFolder, "complete", kill)
            if (number + 1) % EVERY == 0:
                step.save(kept, extra, asynchronous=number > 4 or what == "write asynchronously")
    step.close()


def train_with_trials(folder: str, steps: int, deaths: dict[int, tuple[str, Sequence[int]]]) -> None:
    """The same, with plans that are tried."""
    os.environ["COMMFUSE_LOGS"] = "plan"
    with quickly("size 1"):
        train(folder, steps, {"schedule": "auto"}, deaths)


def losses(folder: Path, rank: int) -> tuple[list[float], int]:
    """The loss of each step, of the last time that it was run, and how often any was run."""
    lines = [json.loads(line) for line in (folder / f"{rank}.losses").read_text().splitlines()]
    found = dict(lines)
    return [found[number] for number in range(len(found))], len(lines)


def start(ranks: Ranks, folder: Path, function: Any, *args: Any) -> Sequence[Ended]:
    return run_programs(ranks, run_and_leave, function, str(folder), *args, files=folder, folder=ROOT)


SHARED = {"parallel_optimizer_threshold": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "in an update": {"enable_parallel_optimizer": True, "parallel_optimizer_config": SHARED},
    "writing on one rank": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {**SHARED, "level": 3}},
}
"""Where ranks share the updates. On two ranks these are the bits of plain data parallel."""

DEATHS: dict[str, tuple[int, dict[int, tuple[str, Sequence[int]]]]] = {
    "between steps": (8, {10: ("step", (0, 1))}),
    "in an update": (8, {10: ("update", (1,))}),
    "writing on one rank": (4, {7: ("write", (1,))}),
    "writing on all": (4, {7: ("write", (0, 1))}),
    "writing asynchronously": (4, {7: ("write asynchronously", (1,))}),
    "completing": (4, {7: ("complete", (0,))}),
    "the first one": (0, {3: ("write", (0, 1))}),
}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has written its losses that nobody has killed."""
    folder = tmp_path_factory.mktemp("whole")
    ended = start(ranks, folder, train, 12, {}, {})
    assert [each.code for each in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize("when", DEATHS)
def test_a_restart_goes_on_with_the_same_bits(ranks: Ranks, whole: Path, tmp_path: Path, when: str) -> None:
    last, deaths = DEATHS[when]
    broken = tmp_path
    options = OPTIONS.get(when, {})
    ended = start(ranks, broken, train, 12, options, deaths)
    dead = [rank for rank, each in enumerate(ended) if each.code == -signal.SIGKILL]
    assert dead == [*next(iter(deaths.values()))[1]]
    for each in ended:
        assert each.code in (0, -signal.SIGKILL) or "CollectiveError" in each.err, each.err
    assert (broken / "kept").exists() == (last > 0)
    ran = [losses(broken, rank)[1] for rank in range(2)]
    ended = start(ranks, broken, train, 12, options, {})
    assert [each.code for each in ended] == [0, 0], ended
    for rank in range(2):
        (want, count), (have, again) = losses(whole, rank), losses(broken, rank)
        assert have == want and len(want) == count == 12 and len(set(want)) == 12
        begun = 12 - (again - ran[rank])
        assert begun == last or (begun, last) == (4, 8), "the save of step 8 may still have been running"
    assert [name for name in os.listdir(broken) if "kept" in name] == ["kept"]


def test_a_restart_goes_on_with_the_plan_that_was_found(ranks: Ranks, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = 110
    for folder, deaths in ((whole, {}), (broken, {70: ("step", (0, 1))}), (broken, {73: ("step", (0,))}), (broken, {})):
        folder.mkdir(exist_ok=True)
        ended = start(ranks, folder, train_with_trials, steps, deaths)
        assert bool(deaths) == (ended[0].code == -signal.SIGKILL) and bool(deaths) == bool(ended[1].code), ended
        begins = "an earlier run has come to plan size 1, which is tried first" in ended[0].err
        assert begins == (folder is broken and 70 not in deaths), ended[0].err
        index = json.loads((folder / "kept" / "commfuse.json").read_text())
        assert index["values"]["plan"]["plan"] == "size 1"  # also when the run that began with it has not settled yet
    for rank in range(2):
        assert losses(broken, rank)[0] == losses(whole, rank)[0]


RESTARTS: list[dict[int, tuple[str, Sequence[int]]]] = [
    {6: ("step", (1,))},
    {7: ("write", (0,))},
    {10: ("step", (0, 1))},
    {},
]
"""Who is killed at which step: in the first run, and after each restart."""


def train_again(folder: str) -> None:
    """One start of all ranks by the agent of torchrun, which counts them."""
    shared = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {**SHARED, "level": 3}}
    train(folder, 12, shared, RESTARTS[int(os.environ["TORCHELASTIC_RESTART_COUNT"])])


def launch(folder: str) -> None:
    """What torchrun does, with ranks that are forks: they need not import anything anew."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=3, monitor_interval=0.1, start_method="fork",
        run_id="run", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(config, train_again)(folder)


def test_elastic_restarts(ranks: Ranks, whole: Path, tmp_path: Path) -> None:
    """torchrun's agent starts all ranks again when one is killed in a step, in a save, and when all of them are."""
    broken = tmp_path
    (ended,) = run_programs(ranks, launch, str(broken), files=broken, folder=ROOT, size=1)
    assert ended.code == 0, ended.err
    for rank in range(2):
        want, have = losses(whole, rank)[0], losses(broken, rank)[0]
        assert have == want and len(want) == 12
        run = [json.loads(line)[0] for line in (broken / f"{rank}.losses").read_text().splitlines()]
        begins = [after for before, after in pairwise([-1, *run]) if after != before + 1]
        assert begins in ([4, 4, 4], [4, 4, 8]), run  # 4: when all were killed, the save of step 8 was still running
    assert [name for name in os.listdir(broken) if "kept" in name] == ["kept"]
