"""A rank that dies without a word, or of an error in its loop: the other one is told, and does not hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.ending_ranks import WAYS

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEVICE = "cuda:0"


def run(way: str) -> list[tuple[int, str]]:
    """Exit code and output of both ranks, which have a minute."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("ending_ranks.py")), DEVICE, way]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_the_other_rank_is_told(way: str) -> None:
    (code, said), (other_code, other) = run(way)
    assert code == 0 and "told:" in said, said
    assert other_code == (-signal.SIGKILL if way == "killed" else 1), other
