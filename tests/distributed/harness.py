"""Real ranks to run test functions on.

`Ranks` keeps a few warm processes. Every run gives them a new Gloo world of its own, calls one function on
each, and returns what each rank returned or raised; a rank that dies is replaced by a new process.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from tests.distributed.rank_server import RankServers

WORLD_TIMEOUT = 1800.0
"""Seconds until a collective that some rank does not join fails: longer than any run. To ranks that wait while
they are held, by a signal or a busy machine, that time counts too."""

RUN_TIMEOUT = 300.0
"""Seconds until a run counts as hung: all its ranks are killed, and their stacks are shown. A run takes seconds,
and ten times as long where others take the processor."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did. `error` is `type: message` of the exception that ended it, `died` its exit code.

    `seconds`: how long the function took, without the start of the world.
    """

    rank: int
    value: Any = None
    error: str = ""
    details: str = ""
    died: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and self.died is None


class Hung(AssertionError):
    """A run did not end in time."""


class _Worker:
    """One rank: its process, its pipe, and the file that holds what it prints."""

    def __init__(self, servers: RankServers, server: int) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="rank-", suffix=".log")  # noqa: SIM115
        self._servers, self.server = servers, server
        self.pipe = servers.ask(server, "fork", self.log.name)
        self.pid: int = self.pipe.recv()
        self.exit_code: int | None = None

    def wait(self) -> int:
        """The exit code of a process that ends."""
        if self.exit_code is None:
            with self._servers.ask(self.server, "wait", self.pid) as answer:
                self.exit_code = answer.recv()
        return self.exit_code

    def stop(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self.pipe.close()
        self.log.close()

    def printed(self, last: int = 6000) -> str:
        with open(self.log.name, errors="replace") as file:
            return file.read()[-last:]


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank whose agent holds the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Ranks:
    """A pool of rank processes, of which one comes from another server than the others. Not thread-safe; close it at
    the end."""

    def __init__(self) -> None:
        self.servers = RankServers()
        self._workers: list[_Worker] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int = 2,
        world_timeout: float = WORLD_TIMEOUT,
        timeout: float = RUN_TIMEOUT,
    ) -> list[Outcome]:
        """Call `function(*args)` on ranks 0..size-1 of a new world. `function` and `args` are pickled.

        The world is there when the function starts: RANK, MASTER_ADDR and so on are set as torchrun sets them,
        and `commfuse_fx.init(timeout=world_timeout)` has been called. Raises Hung after `timeout` seconds.
        """
        import torch.distributed as dist

        if os.environ.get("TESTS_VERIFY_STEPS"):  # by hand: all steps of a run verify themselves
            from tests.verifying import asked_for

            function, args = asked_for, (function, *args)
        while len(self._workers) < size:
            server = int(any(not worker.server for worker in self._workers))
            self._workers.append(_Worker(self.servers, server))
        # The store lives here, as torchrun's does in its agent: a rank that dies does not take it along.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = self._workers[:size]
        for rank, worker in enumerate(workers):
            # What ranks have in common is verified once.
            environment = rank_environment(rank, size, store.port) | {"COMMFUSE_VERIFY": str(int(rank == 0))}
            worker.pipe.send_bytes(pickle.dumps((function, args, environment, world_timeout)))
        outcomes = self._collect(workers, timeout)
        for outcome, worker in zip(outcomes, workers, strict=True):
            if outcome.died is not None:
                worker.stop()
                self._workers.remove(worker)
        return outcomes

    def values(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `run`, for a function that must succeed on every rank."""
        outcomes = self.run(function, *args, **options)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            raise AssertionError("\n".join(f"rank {o.rank} ({o.died=}):\n{o.details or o.error}" for o in failed))
        return [outcome.value for outcome in outcomes]

    def values_of_other_seeds(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `values`, on two ranks whose hash seeds are neither each other's nor this process's."""
        found = self.values(_with_seed, function, args)
        assert len(dict.fromkeys([hash("seed"), *(seed for seed, _ in found)])) == 3
        return [value for _, value in found]

    def renew(self) -> None:
        """The next run has ranks that have run nothing before."""
        self._stop()

    def close(self) -> None:
        self._stop()
        self.servers.close()

    def _stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _collect(self, workers: list[_Worker], timeout: float) -> list[Outcome]:
        left = timeout
        found: dict[int, Outcome] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting:
            ready = connection.wait(list(waiting), min(left, 1.0))
            if not ready:
                left -= 1.0  # also where all processes were held for minutes
                if left <= 0:
                    raise Hung(self._give_up(workers, timeout, sorted(waiting.values())))
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcome = Outcome(rank, **pickle.loads(workers[rank].pipe.recv_bytes()))
                except (EOFError, ConnectionResetError):
                    died = workers[rank].wait()
                    outcome = Outcome(rank, died=died, details=workers[rank].printed())
                found[rank] = outcome
        return [found[rank] for rank in range(len(workers))]

    def _give_up(self, workers: list[_Worker], timeout: float, hung: list[int]) -> str:
        for worker in workers:
            if worker.exit_code is None:
                os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)
        shown = "\n".join(f"--- rank {rank}\n{worker.printed()}" for rank, worker in enumerate(workers))
        self._stop()
        return f"ranks {hung} did not end within {timeout} s\n{shown}"


def _with_seed(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, Any]:
    return hash("seed"), function(*args)


def serve_rank(pipe: connection.Connection, log: str) -> None:
    """A rank's life: one request after another."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Whoever starts the tests in the background of a shell leaves them one that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    import torch
    import torch.distributed as dist

    import commfuse_fx as cf
    from commfuse_fx.planning import compile_call
    from tests import absent_devices, plans

    # A fork makes PyTorch's pool of threads anew at its first use. Two threads that come at once abort the process.
    torch.set_num_threads(torch.get_num_threads())
    plans.share()
    absent_devices.leave_unseeded()
    captures = compile_call.capture, compile_call.capture_joint
    gc.set_threshold(100_000, 10, 10)
    gc.enable()
    while True:
        try:
            function, args, environment, world_timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        answer: dict[str, Any] = {}
        start = time.monotonic()
        try:
            cf.init(timeout=world_timeout)
            dist.barrier()  # or a rank whose function does not communicate leaves before others have joined
            start = time.monotonic()
            answer["value"] = function(*args)
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            answer["details"] = "".join(traceback.format_exception(error))
            error.__traceback__ = None  # its frames hold process groups
        answer["seconds"] = time.monotonic() - start
        pipe.send_bytes(pickle.dumps(answer))
        cf.reset_auto_parallel_context()
        compile_call.capture, compile_call.capture_joint = captures  # which tests.captures may have replaced
        gc.collect()
        gc.freeze()  # plans that later runs share: looking through them again would take longer than most runs
        if dist.is_initialized():
            dist.destroy_process_group()


def hurry(seconds: float) -> None:
    """All ranks have come here, and from now on they wait so many seconds for each other. What came before has had the
    time-out of the world, since one rank may take seconds longer to compile than another."""
    import torch.distributed as dist

    dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


SOON = 120.0
"""Seconds in which every rank must have its result or its error, on a machine that others use too."""


def run_soon(ranks: Ranks, function: Any, *args: Any, size: int = 2) -> list[Outcome]:
    """Run, and see that no rank waits for the time-out of the world: that lasts longer than the run may."""
    return ranks.run(function, *args, size=size, timeout=SOON)
