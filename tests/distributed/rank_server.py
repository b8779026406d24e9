"""Programs that fork ranks. They have imported what ranks need, and all test processes of a run share them.

A request is one connection: ("fork", file) is answered by the new rank, with its process number, and stays its pipe;
("program", program) is answered so too, by a process that calls `program` as a script calls its main function;
("wait", number) is answered with the exit code of that process.

Why: docs/decisions.md, "Ranks of the tests are forks of two servers, and plan equal programs once".
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

FOLDER = "COMMFUSE_TEST_RANKS"
"""The environment variable that says where the sockets of servers are which another process has started."""

SERVERS = 2
"""Forks of one program share its hash seed and addresses, in which ranks must be free to differ."""

START_TIMEOUT = 60.0
"""Seconds until a server that does not answer counts as broken."""

ROOT = Path(__file__).resolve().parents[2]


class RankServers:
    """The servers of a run of the tests: those of the environment, or new ones, which end with this process."""

    def __init__(self) -> None:
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.folder = os.environ.get(FOLDER, "")
        if not self.folder:
            self._own = tempfile.TemporaryDirectory(prefix="ranks-")
            self.folder = self._own.name
            # Ranks differ in the hash seed, also where it is fixed for the tests.
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            for number in range(SERVERS):
                command = [sys.executable, "-m", __name__, self.path(number)]
                self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=environment))

    def path(self, number: int) -> str:
        """The socket of one server."""
        return f"{self.folder}/{number}"

    def ask(self, number: int, *request: Any) -> Connection:
        """A connection on which the request has been made."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                pipe = Client(self.path(number), family="AF_UNIX")
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        pipe.send(request)
        return pipe

    def close(self) -> None:
        """End the servers that this object has started, and their ranks."""
        for process in self._processes:
            process.communicate()
        self._processes.clear()
        if self._own is not None:
            self._own.cleanup()


def serve(path: str, run_rank: Callable[[Connection, str], None]) -> Callable[[], object]:
    """Answer requests until standard input ends. Returns what this process is to call then: in a fork, its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever runs the tests
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ranks: list[int] = []
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        pipe = Connection(listener.accept()[0].detach())
        verb, argument = pipe.recv()
        if verb == "wait":
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1]))
            ranks.remove(argument)
        else:
            _import()
            number = os.fork()
            if not number:
                listener.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                try:
                    pipe.send(os.getpid())
                    if verb == "program":
                        pipe.close()
                        return argument
                    run_rank(pipe, argument)
                except BaseException:
                    traceback.print_exc()  # into the file of the rank
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            ranks.append(number)
        pipe.close()
    for number in ranks:
        os.kill(number, signal.SIGKILL)
    return lambda: None


def _import() -> None:
    """Import what ranks need when the first of them is asked for, and leave it out of every collection."""
    gc.disable()
    import_module("tests.distributed.preloaded")
    gc.freeze()


if __name__ == "__main__":
    from tests.distributed.harness import serve_rank

    serve(sys.argv[1], serve_rank)()
