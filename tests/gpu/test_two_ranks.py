"""Two ranks on one GPU, which talk over NCCL, against DistributedDataParallel.

They run all checks one after the other in one world, and this module looks up what they have found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.two_rank_checks import cases_on

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank has found: the traceback of each check, or an empty text."""
    folder = tmp_path_factory.mktemp("two_ranks")
    script = str(Path(__file__).with_name("two_rank_checks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMMFUSE_CACHE": "0"}
    try:
        ended = subprocess.run(
            [*command, str(CUDA), str(folder)], env=environment, capture_output=True, text=True, timeout=240
        )
        said = ended.stderr
    except subprocess.TimeoutExpired as error:
        said = f"not done after {error.timeout} s"
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), said[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", cases_on(CUDA))
def test_two_ranks(name: str, found: list[dict[str, str]]) -> None:
    for rank, results in enumerate(found):
        broken = [each for each, traceback in results.items() if traceback]
        assert name in results, (
            f"rank {rank} did not come to it: it failed at {broken or 'the check after the last one'}"
        )
        assert not results[name], results[name]
