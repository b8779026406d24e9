"""What a process learns of its place among ranks: from a launcher, from arguments, from nobody."""

from __future__ import annotations

import os
import socket
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.support.launchers import rank_variable, several_ranks
from tests.distributed.harness import Ranks

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE",
    "PMI_RANK",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "said", "rank"),
    [
        ({}, "", "RANK"),
        ({"WORLD_SIZE": "1"}, "", "RANK"),
        ({"WORLD_SIZE": " "}, "", "RANK"),
        ({"WORLD_SIZE": " 3"}, "torchrun has started 3 ranks (WORLD_SIZE=3)", "RANK"),
        ({"SLURM_NTASKS": "4"}, "", "RANK"),  # of a job, whose script runs once
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, "", "SLURM_PROCID"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 ranks (SLURM_STEP_NUM_TASKS=4)", "SLURM_PROCID"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 ranks (OMPI_COMM_WORLD_SIZE=2)", "OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2"}, "mpiexec has started 2 ranks (PMI_SIZE=2)", "PMI_RANK"),
        ({"PMI_SIZE": "1"}, "", "PMI_RANK"),
        # torchrun in each task of srun, with one process each, for trainings of their own.
        ({"SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "1"}, "", "RANK"),
    ],
)
def test_what_launchers_say(environment: dict[str, str], said: str, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (several_ranks(), rank_variable()) == (said, rank)
    if said and rank != "RANK":
        with pytest.raises(cf.ConfigValueError, match=rf"pass rank=.*{rank}"):
            cf.init()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3"}, (0, 1)),  # of nobody knows how many
        ({"WORLD_SIZE": "4", "RANK": "3"}, (3, 4)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, (2, 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, (1, 2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, (1, 2)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
    ],
)
def test_a_rank_knows_its_place_before_it_joins(
    environment: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are seeded with the rank would be the same on all ranks otherwise."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (cf.get_rank(), cf.get_group_size()) == place


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
@pytest.mark.parametrize("text", ["two", "-1", "2.0"])
def test_a_launcher_that_gives_no_number_is_no_world_of_one(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    x = torch.ones(2, 4)
    for call in (cf.init, cf.get_rank, cf.get_group_size, lambda: cf.compile(nn.Linear(4, 4))(x)):
        with pytest.raises(cf.ConfigValueError, match=f"{name} is '{text}' in the environment.*: give a number, or"):
            call()
    cf.compile(nn.Linear(4, 4), parallel_mode="stand_alone")(x).sum().backward()


def test_a_launcher_that_does_not_say_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(cf.ConfigValueError, match=r"started 2 ranks \(WORLD_SIZE=2\), but RANK does not say which"):
        cf.get_rank()


def uses() -> dict[str, Any]:
    """What uses the ranks, of everything that is compiled."""
    x = torch.ones(2, 4)

    def made(**options: Any) -> Any:
        model = nn.Linear(4, 4)
        return cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)

    def evaluated(**options: Any) -> None:
        compiled = cf.compile(nn.Linear(4, 4), **options)
        with torch.no_grad():
            compiled(x)

    def updated() -> None:
        model = nn.Linear(4, 4)
        cf.ShardedOptimizer(cf.compile(model), torch.optim.SGD, lr=0.1).step()

    return {
        "step": lambda: made()(x, x),
        "evaluation": lambda: made().model.eval() and made()(x, x),
        "text": lambda: made().lower(x, x),
        "micro-batch": lambda: made(accumulate_steps=2).lower_micro_batch(x, x),
        "save": lambda: made().save("nowhere"),
        "load": lambda: made().load("nowhere"),
        "load_state_dict": lambda: made().load_state_dict({}),
        "profile": lambda: made().profile(x, x),
        "divided": lambda: made(parallel_mode="semi_auto")(x, x),
        "module": lambda: cf.compile(nn.Linear(4, 4))(x),
        "evaluated module": evaluated,
        "text of module": lambda: cf.compile(nn.Linear(4, 4)).lower(x),
        "join": lambda: cf.compile(nn.Linear(4, 4)).join(),
        "dynamo": lambda: cf.compile(nn.Linear(4, 4), capture="dynamo")(x),
        "text of dynamo": lambda: cf.compile(nn.Linear(4, 4), capture="dynamo").lower(x),
        "backend": lambda: torch.compile(nn.Linear(4, 4), backend="commfuse")(x),
        "ShardedOptimizer": updated,
    }


def test_whoever_is_one_of_several_has_to_join_before_the_ranks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for use in uses().values():
        with pytest.raises(cf.CommFuseError, match='mpirun has started 2 ranks .*parallel_mode="stand_alone"'):
            use()
    alone = cf.compile(nn.Linear(4, 4), parallel_mode="stand_alone")
    alone(x).sum().backward()
    assert cf.compile(nn.Linear(4, 4), device_num=2, form="step", loss_fn=F.mse_loss).lower(x, x).collectives
    torch._dynamo.reset()


def test_a_process_alone_may_call_before_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has trained alone is not stopped by a launcher's variable that comes later, as in a notebook."""
    module = cf.compile(nn.Linear(4, 4))
    module(torch.ones(2, 4)).sum().backward()
    monkeypatch.setenv("WORLD_SIZE", "2")
    module(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"rank": 0}, cf.ConfigValueError, "world_size is not given, and WORLD_SIZE is not in the environment"),
        ({"world_size": 2}, cf.ConfigValueError, "rank is not given, and RANK is not in the environment"),
        ({"init_method": "tcp://localhost:1"}, cf.ConfigValueError, "rank is not given"),
        ({"rank": 2, "world_size": 2}, cf.ConfigValueError, "give a rank in 0..1"),
        ({"rank": -1, "world_size": 2}, cf.ConfigValueError, "rank is -1; give an int >= 0"),
        ({"rank": True, "world_size": 2}, cf.ConfigTypeError, "rank is True"),
        ({"rank": 0, "world_size": "2"}, cf.ConfigTypeError, "world_size is '2'"),
        ({"rank": 0, "world_size": 0}, cf.ConfigValueError, "world_size is 0; give an int >= 1"),
        (
            {"rank": 0, "world_size": 2},
            cf.ConfigValueError,
            "world_size=2 without init_method, and without MASTER_ADDR",
        ),
        ({"rank": 0, "world_size": 2, "init_method": 29500}, cf.ConfigTypeError, "init_method is 29500; give"),
        *(
            ({"rank": 0, "world_size": 2, "init_method": method}, cf.ConfigValueError, "init_method is .*; give")
            for method in (
                "",
                "localhost:29500",
                "tcp://localhost",
                "tcp://:29500",
                "tcp://a:99999",
                "file://",
                "udp://a:1",
            )
        ),
    ],
)
def test_arguments_of_init_that_say_no_place(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        cf.init(**given)
    assert not dist.is_initialized()


LISTED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "given", "said"),
    [
        ({**LISTED, "RANK": "first"}, {}, "RANK is 'first' in the environment.* pass rank="),
        ({**LISTED, "WORLD_SIZE": "two"}, {}, "WORLD_SIZE is 'two' in the environment"),
        ({**LISTED, "RANK": "2"}, {}, "RANK is 2 and WORLD_SIZE is 2 in the environment"),
        ({**LISTED, "MASTER_PORT": "http"}, {"rank": 0}, "MASTER_PORT is 'http' in the environment"),
        ({"MASTER_ADDR": "127.0.0.1"}, {"rank": 0, "world_size": 2}, "MASTER_PORT is not in the environment"),
        ({"MASTER_ADDR": "127.0.0.1", "RANK": "0"}, {}, "WORLD_SIZE is not in the environment"),
        ({"WORLD_SIZE": "two"}, {"rank": 0}, "world_size is not given, and WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_variables_that_say_no_place(
    environment: dict[str, str], given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(cf.ConfigValueError, match=said):
        cf.init(**given)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backend", "error"),
    [("glo", cf.ConfigValueError), ("cpu:gloo,cuda:foo", cf.ConfigValueError), (1, cf.ConfigTypeError)],
)
def test_a_backend_that_is_not_there(backend: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"backend is .*{backend}.*give .*gloo"):
        cf.init(backend)
    assert not dist.is_initialized()


@pytest.mark.parametrize("given", [{}, {"rank": 0, "world_size": 1}, {"rank": 0}], ids=str)
def test_a_world_of_one(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(given) == 1:
        monkeypatch.setenv("WORLD_SIZE", "1")
    cf.init(**given)
    try:
        assert dist.get_world_size() == 1
        cf.init()
        cf.init(rank=0, world_size=1)
        with pytest.raises(
            cf.ConfigValueError, match="rank=1 and world_size=2, but this process is already rank 0 of 1"
        ):
            cf.init(rank=1, world_size=2)
    finally:
        dist.destroy_process_group()


def test_ranks_that_do_not_come(tmp_path: Path) -> None:
    with pytest.raises(cf.CollectiveError, match="rank 0 of 2 .* could not join the others, .* 1 s or"):
        cf.init(timeout=1, rank=0, world_size=2, init_method=f"file://{tmp_path / 'ranks'}")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        method = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(cf.CollectiveError, match="rank 0 of 2 .* its port is taken: choose another"):
            cf.init(timeout=5, rank=0, world_size=2, init_method=method)


def child(rank: int, method: str, pickled: list[bytes], folder: str) -> None:
    compiled = ForkingPickler.loads(pickled[rank])
    said = ""
    try:
        cf.init()
    except cf.ConfigValueError as error:
        said = str(error)
    assert "child of multiprocessing" in said and "rank=, world_size= and init_method=" in said
    cf.init(rank=rank, world_size=2, init_method=method)
    x = torch.full((2, 4), float(rank))
    for _ in range(2):
        compiled(x, x)
    Path(folder, str(rank)).write_text(str(float(compiled.model.weight.detach().double().norm())))
    dist.destroy_process_group()


def spawns(folder: str) -> None:
    """As mp.spawn, which pickles the step so, but for imports, which take seconds."""
    dist.destroy_process_group()
    for name in VARIABLES:
        os.environ.pop(name, None)
    model = nn.Linear(4, 4)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    pickled = [bytes(ForkingPickler.dumps(step)) for _ in range(2)]
    start_processes(child, (f"file://{folder}/ranks", pickled, folder), nprocs=2, start_method="fork")


@pytest.mark.dist
def test_a_step_that_is_handed_to_spawned_ranks_trains_with_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(spawns, str(tmp_path), size=1)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() != ""
