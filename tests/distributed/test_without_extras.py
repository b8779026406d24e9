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
    environment = os.environ | rank_environment(0, 2, store.port) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {"rank 0: PeerFailedError", "rank 1: RuntimeError"} <= set(ended.stdout.splitlines())
