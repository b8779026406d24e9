"""A step on every GPU of the machine, over NCCL, as torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

WORKER = """
import torch, torch.distributed as dist, torch.nn as nn, commfuse_fx as cf
cf.init()
torch.manual_seed(0)
device = torch.device("cuda", torch.cuda.current_device())
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
step = cf.compile(model, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))
x, y = torch.randn(16, 32, device=device), torch.randint(0, 10, (16,), device=device)
losses = [float(step(x, y)) for _ in range(5)]
assert losses[-1] < losses[0], losses
work = dist.all_reduce(torch.ones(4, device=device), async_op=True)
work.wait()
print("OK", cf.get_group_size())
dist.destroy_process_group()
"""


def test_torchrun_on_every_gpu(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ranks = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("OK") == ranks
