"""Programs of two ranks on one device that end in different ways, while a step is live or after it was closed.

`ending_ranks.py DEVICE FOLDER WAY...` imports once what ranks need, also what an optimizer and a compilation import at
their first use, and forks two of them for each way. No agent starts them, since it would end a rank whose neighbour has
died. Each rank ends as an interpreter does, and leaves in FOLDER what it has printed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

import commfuse_fx as cf
import commfuse_fx.api
from benchmarks.two_ranks import join_as_host_of_its_own
from tests.gpu.device_models import MODELS
from tests.gpu.step_checks import OPTIMIZERS

WAYS = ("close", "destroy", "live", "killed", "raises")
AFTER_VOTE = ("killed after the vote", "raises after the vote")
"""Rank 1 leaves after the vote on a step, before it launches the step's CUDA graph."""

BEFORE = 8
"""Steps before a rank ends: by then they run from a CUDA graph."""

AT_ONCE = 4
"""So many pairs of ranks share the device."""

TIME = 90
"""Seconds after which a rank counts as hung."""

ROOT = Path(__file__).parents[2]
Ended = list[tuple[int | None, str]]
"""Exit code and output of each rank; None where it hung."""


def run(device: torch.device, folder: Path, ways: Sequence[str]) -> dict[str, Ended]:
    """How the ranks of these ways end."""
    command = [sys.executable, __file__, str(device), str(folder), *ways]
    # So that nobody touches CUDA before ranks are forked: forks could not use it any more.
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    ended = subprocess.run(command, env=shared, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout)
    said = {way: [(folder / f"{way}.{rank}").read_text() for rank in range(2)] for way in ways}
    return {way: [*zip(codes[way], said[way], strict=True)] for way in ways}


def check(way: str, ended: Ended) -> None:
    (code, said), (other_code, other) = ended
    told = f"{said}\nrank 1:\n{other}"
    if way in ("close", "destroy", "live"):
        assert (code, other_code) == (0, 0) and "ran" in said, told
        return
    if way in AFTER_VOTE:
        assert code not in (0, None) and other_code not in (0, None) and "CollectiveError: rank 0: " in said, told
        return
    assert other_code == (-signal.SIGKILL if way == "killed" else 1), told
    assert code == 0 and "told:" in said, told


def train(device: torch.device, way: str) -> None:
    """What a rank does."""
    join_as_host_of_its_own(timeout=20)
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    optimizer = OPTIMIZERS["AdamW fused"](model.parameters())
    step = cf.compile(model, optimizer=optimizer, cuda_graph=device.type == "cuda")
    leaves = dist.get_rank() == 1 and way not in ("close", "destroy", "live")
    try:
        for number, batch in enumerate(case.batches(device, torch.float32, 2 * BEFORE)):
            if number == BEFORE and leaves and way in AFTER_VOTE:
                assert step.session.graphs is not None
                step.session.graphs.replay = partial(_leave, way)
            elif number == BEFORE and leaves:
                _leave(way)
            float(step(**batch))
    except cf.CommFuseError as error:
        if way in AFTER_VOTE:
            raise
        print(f"told: {error}", flush=True)
        return
    print("ran", flush=True)
    if way == "close":
        step.close()
    if way in ("close", "destroy"):
        dist.destroy_process_group()


def _leave(way: str, *_: Any) -> Any:
    if way.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise FileNotFoundError("the loader has found no file")


def start(device: torch.device, folder: Path, ways: Sequence[str]) -> Callable[[], None]:
    """Fork the ranks. Returns what this process is to call then: a fork trains, and the first process says how they
    ended."""
    assert not torch.cuda.is_initialized()
    gc.freeze()  # or every collection of a rank copies what it shares with this process
    codes: dict[str, list[int | None]] = {}
    for first in range(0, len(ways), AT_ONCE):
        together = ways[first : first + AT_ONCE]
        ranks = {}
        for way, port in zip(together, _free_ports(len(together)), strict=True):
            for rank in range(2):
                number = os.fork()
                if not number:
                    printed = os.open(folder / f"{way}.{rank}", os.O_WRONLY | os.O_CREAT)
                    os.dup2(printed, 1)
                    os.dup2(printed, 2)
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank))
                    torch.set_num_threads(torch.get_num_threads())  # a fork makes the pool of threads anew
                    return partial(train, device, way)
                ranks[number] = way, rank
        for way in together:
            codes[way] = [None, None]
        for number, code in _ends(list(ranks)).items():
            way, rank = ranks[number]
            codes[way][rank] = code
    return lambda: print(json.dumps(codes))


def _free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _ends(numbers: list[int]) -> dict[int, int]:
    """The exit codes of these processes, without those that hang, which are killed."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + TIME
    while (left := [number for number in numbers if number not in found]) and time.monotonic() < deadline:
        for number in left:
            if (ended := os.waitpid(number, os.WNOHANG))[0]:
                found[number] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.02)
    for number in left:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    return found


if __name__ == "__main__":
    start(torch.device(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])()
