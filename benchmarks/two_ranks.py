"""Two ranks on one device against DistributedDataParallel: are the parameters equal, bit for bit, after some steps?

NCCL takes two ranks of one GPU only if it believes that they are on two hosts, which NCCL_HOSTID tells it. They then
talk over sockets: good for right and wrong, and not for speed.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from benchmarks.plain_models import NormedMLP

ON_ONE_GPU = {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

FUSIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "size": {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
    "index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [3]}}},
    "optimal": {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}, "cluster": "default"},
    "off": {"comm_fusion": {"openstate": False}},
    "across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "default"},
}


def join_as_host_of_its_own(timeout: float = 60) -> None:
    """Start the world of this process, which has RANK and so on, in such a way that several ranks can share a GPU.

    timeout: seconds until a collective that some rank does not join fails.
    """
    os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"host{os.environ['RANK']}")
    cf.init(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else None, timeout=timeout)


def batches(device: torch.device, count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(count, 8, 64, generator=generator).to(device)
    labels = torch.randint(0, 10, (count, 8), generator=generator).to(device)
    return [{"x": one, "labels": other} for one, other in zip(x, labels, strict=True)]


def by_ddp(model: nn.Module) -> list[torch.Tensor]:
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for batch in batches(next(model.parameters()).device):
        optimizer.zero_grad()
        ddp(**batch).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def by_step(model: nn.Module, **options: Any) -> list[torch.Tensor]:
    step = cf.compile(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), **options)
    for batch in batches(next(model.parameters()).device):
        step(**batch)
    step.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def compared(device: torch.device, fusions: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each fusion, without and with CUDA graphs: are parameters equal to those of DDP, and what is the worst
    difference? why: the reason for which a case did not run."""
    torch.manual_seed(0)
    model = NormedMLP(64, 4).to(device)
    wanted = by_ddp(copy.deepcopy(model))
    found = []
    for name, options in fusions.items():
        for graph in (False, True)[: 1 if "schedule" in options else 2]:  # no graph leaves anything to the next step
            row: dict[str, Any] = {"case": name + (", CUDA graph" if graph else ""), "why": None}
            try:
                have = by_step(copy.deepcopy(model), **options, cuda_graph=graph)
            except (cf.NotAvailableError, cf.ConfigValueError) as error:
                found.append({**row, "why": str(error), "equal": False, "worst": None})
                continue
            worst = max(float((mine - other).abs().max()) for mine, other in zip(have, wanted, strict=True))
            found.append({**row, "equal": not worst, "worst": worst})
    return found


def compare_two_ranks(device: str, timeout: float = 120) -> list[dict[str, Any]]:
    """Start two ranks on the device and return what rank 0 has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    try:
        ended = subprocess.run(
            [*command, "-m", "benchmarks.two_ranks", device], capture_output=True, text=True, timeout=timeout
        )
        why = "" if ended.returncode == 0 else f"exit code {ended.returncode}"
        said = ended.stderr
    except subprocess.TimeoutExpired as error:
        why, said = f"not done after {timeout:.0f} s", str(error)
    if why:
        print(said[-4000:], file=sys.stderr)
        return [{"case": "all", "equal": False, "worst": why, "why": None}]
    rows: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return rows


if __name__ == "__main__":
    join_as_host_of_its_own()
    result = compared(torch.device(sys.argv[1]), FUSIONS)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
