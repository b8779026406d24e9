"""Scripts on real ranks: processes that nobody catches errors in, and that end as an interpreter ends.

They are forks of the programs that fork ranks, and start without importing anything anew.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.harness import RUN_TIMEOUT, Ranks, rank_environment


@dataclass(frozen=True)
class Ended:
    """How a process has ended, and what it has printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Script:
    """Calls a function in a folder, with these variables of the environment, and prints into files."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    folder: str
    environment: Mapping[str, str]
    prints: tuple[str, str]

    def __call__(self) -> None:
        os.chdir(self.folder)
        os.environ.update(self.environment)
        for number, name in enumerate(self.prints, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(torch.get_num_threads())  # a fork makes the pool of threads anew
        gc.enable()
        self.function(*self.args)


def run_module(name: str, *arguments: str) -> None:
    """As `python -m name arguments`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_and_leave(function: Callable[..., object], *args: Any) -> None:
    """Where nothing fails the process ends at once: freeing all that torch consists of would take longer."""
    function(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_programs(
    ranks: Ranks,
    function: Callable[..., Any],
    *args: Any,
    files: Path,
    folder: Path,
    size: int = 2,
    timeout: float = RUN_TIMEOUT,
) -> Sequence[Ended]:
    """How as many new processes end that call `function(*args)` in `folder`. What they print goes to `files`.

    Each finds in its environment what torchrun sets. Raises AssertionError after `timeout` seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers, ended = [], []
    try:
        for rank in range(size):
            prints = str(files / f"{rank}.out"), str(files / f"{rank}.err")
            environment = rank_environment(rank, size, store.port)
            with ranks.servers.ask(0, "program", Script(function, args, str(folder), environment, prints)) as pipe:
                numbers.append(pipe.recv())
        for rank, number in enumerate(numbers):
            with ranks.servers.ask(0, "wait", number) as pipe:
                assert pipe.poll(timeout), f"rank {rank} has not ended within {timeout} s"
                code = pipe.recv()
            ended.append(Ended(code, *((files / f"{rank}.{kind}").read_text() for kind in ("out", "err"))))
    finally:
        for number in numbers[len(ended) :]:
            os.kill(number, signal.SIGKILL)
    return ended
