"""What commfuse-fx does where nothing is installed but what it depends on: no numpy, no rich."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.harness import rank_environment

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("loops_without_extras.py")


def test_loops_checkpoints_and_commands_need_no_package_that_is_not_declared(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(2):
        environment = os.environ | rank_environment(rank, 2, store.port) | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path), *(["commands"] if not rank else [])]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT))
    for process, error in zip(started, ("PeerFailedError", "RuntimeError"), strict=True):
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
        assert printed.startswith(error)
