"""The module form on CUDA: as eager PyTorch on one rank, as DistributedDataParallel on two, and never waiting for the
host."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import commfuse_fx as cf

pytestmark = pytest.mark.gpu

Make = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))


def convnet() -> nn.Module:
    convolution = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), convolution, nn.Flatten(), nn.Linear(128, 8))


class Recurrent(nn.Module):
    """The last output of a recurrent module, and both of its states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, states = self.layer(x.view(4, -1, 4))
        last = states[0] if isinstance(states, tuple) else states
        out: torch.Tensor = self.head(torch.cat([output[-1].sum(0), last[-1].sum(0), output.std(0).mean(0)], -1))
        return out


def recurrent(layer: nn.RNNBase) -> nn.Module:
    model = Recurrent(layer)
    model(torch.randn(2, 16))
    return model


MODELS: dict[str, Make] = {
    "mlp": mlp,
    "convnet": convnet,
    "lstm": lambda: recurrent(nn.LSTM(4, 8, 2)),
    "batch first": lambda: recurrent(nn.LSTM(4, 8, 2, batch_first=True)),
    "gru": lambda: recurrent(nn.GRU(4, 8, 2, bidirectional=True)),
    "projected": lambda: recurrent(nn.LSTM(4, 8, bias=False, proj_size=3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager_pytorch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", dtype)
    twin = copy.deepcopy(model)
    compiled = cf.compile(model)
    close = 1e-10 if dtype == torch.float64 else 1e-4
    for step in range(3):
        x = torch.randn(8, 16, device="cuda", dtype=dtype)
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad(set_to_none=step % 2 == 0)
            torch.manual_seed(step)
            call(x).square().mean().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=close, atol=close)
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()])


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_neither_half_waits_for_the_host(name: str) -> None:
    model = MODELS[name]().cuda()
    compiled = cf.compile(model)
    x = torch.randn(8, 16, device="cuda")
    for _ in range(2):
        compiled(x).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad()
        compiled(x).square().mean().backward()
        compiled(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


WORKER = """
import os, sys, copy
rank = int(os.environ["RANK"])
os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
import torch, torch.distributed as dist
from torch import nn
import commfuse_fx as cf
from tests.gpu.test_modules import MODELS
cf.init(backend="cpu:gloo,cuda:nccl", timeout=60)
SMALL = {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}
for name in MODELS:
    for options in ({}, SMALL, {"find_unused_parameters": True}):
        torch.manual_seed(0)
        model = MODELS[name]().to("cuda", torch.float64)
        twin = copy.deepcopy(model)
        ours, theirs = cf.compile(model, **options), nn.parallel.DistributedDataParallel(twin, device_ids=[0])
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, twin)]
        for step in range(4):
            generator = torch.Generator("cuda").manual_seed(10 * step + rank)
            x = torch.randn(8, 16, device="cuda", dtype=torch.float64, generator=generator)
            for call, net, optimizer in ((ours, model, optimizers[0]), (theirs, twin, optimizers[1])):
                torch.manual_seed(step + rank)
                optimizer.zero_grad()
                if step == 2:
                    with call.no_sync():
                        call(x * 2).square().mean().backward()
                # The second part comes past the module, and each rank has another one.
                (call(x).square().mean() + rank * 0.01 * next(net.parameters()).square().sum()).backward()
                optimizer.step()
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=1e-10, atol=1e-10)
        if options.get("find_unused_parameters") is None:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            model.zero_grad()
            ours(x).square().mean().backward()
            torch.cuda.set_sync_debug_mode("default")
        print("same", name, options, flush=True)
dist.destroy_process_group()
"""


def test_two_ranks_give_what_ddp_gives(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.count("same") == 2 * 3 * len(MODELS)
