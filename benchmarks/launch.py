"""Start the ranks of one measurement, and never wait for them longer than they were given."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SHOWN = 4000
"""Characters of a rank's output, counted from its end, that are shown when the run fails."""


class RanksFailed(RuntimeError):
    """A rank failed, or the ranks did not end in time; the message holds what each of them printed."""


def run_ranks(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float, progress: Path
) -> None:
    """Run one command per rank at the same time, each in a process session of its own.

    They are given up when for `timeout` seconds the file `progress` has not grown; its writer must see to it that
    it grows a bounded number of times. Whatever ends this call, no rank outlives it. Raises RanksFailed.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(len(commands))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                with log.open("wb") as out:
                    processes.append(
                        subprocess.Popen(
                            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                        )
                    )
            problem = _watch(processes, timeout, progress)
        finally:
            for process in processes:
                _end(process)
        if problem:
            shown = [f"--- rank {rank}\n{log.read_text(errors='replace')[-SHOWN:]}" for rank, log in enumerate(logs)]
            raise RanksFailed("\n".join([problem, *shown]))


def _watch(processes: Sequence[subprocess.Popen[bytes]], timeout: float, progress: Path) -> str:
    """Wait until all ranks have ended well, and return ""; or until one has not, and return what happened."""
    reached, since = 0, time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return f"rank {rank} ended with exit code {code}"
        if None not in codes:
            return ""
        size = progress.stat().st_size if progress.exists() else 0
        if size > reached:
            reached, since = size, time.monotonic()
        if time.monotonic() - since > timeout:
            left = [rank for rank, code in enumerate(codes) if code is None]
            return f"ranks {left} got nothing done for {timeout:g} s (--timeout)"
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # The whole session: a compiler that the rank started goes with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
