"""Steps that run from CUDA graphs, when they are captured, and how programs with them end."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.gpu.device_models import MODELS
from tests.gpu.graph_pairs import ADAMW, CAPTURED, CUDA, Pair
from tests.gpu.step_checks import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("logged")]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_computes_what_a_step_without_one_does(
    name: str, backend: str, logged: pytest.LogCaptureFixture
) -> None:
    losses = Pair(MODELS[name], backend=backend).run_all()
    assert len({float(loss) for loss in losses}) == 5, "each loss is the caller's to keep"
    assert logged.text.count(CAPTURED) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, logged: pytest.LogCaptureFixture) -> None:
    Pair(MODELS["mlp"], OPTIMIZERS[name]).run_all()
    assert CAPTURED in logged.text


def test_auto_captures_after_a_few_steps(logged: pytest.LogCaptureFixture) -> None:
    Pair(MODELS["gpt2"], cuda_graph="auto").run_all(8)
    assert logged.text.count(CAPTURED) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_scheduled_rate_acts_without_another_capture(backend: str, logged: pytest.LogCaptureFixture) -> None:
    pair = Pair(MODELS["mlp"], backend=backend)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 2.0**-8  # float32 holds it and its halves
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in pair.optimizers]
    for batch in pair.case.batches(CUDA, torch.float32, 8):
        pair.run(batch)
        for scheduler in schedulers:
            scheduler.step()
    assert logged.text.count(CAPTURED) == 1


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum"])
def test_one_cycle(name: str, logged: pytest.LogCaptureFixture) -> None:
    """It changes betas or momentum on every step: three captures, and then none."""
    model = MODELS["mlp"].on(CUDA, torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=60)
    step = cf.compile(model, optimizer=optimizer)
    for batch in MODELS["mlp"].batches(CUDA, torch.float32, 40):
        assert torch.isfinite(step(**batch))
        scheduler.step()
    assert logged.text.count(CAPTURED) == 3
    assert "steps run without CUDA graphs from here on: 3 captures in a row" in logged.text


def test_parameters_in_place_and_replaced(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair(MODELS["mlp"])
    pair.run_all(3)
    with torch.no_grad():
        for net in (pair.model, pair.twin):
            next(net.parameters()).mul_(0.5)
    pair.run_all(2, seed=1)
    assert logged.text.count(CAPTURED) == 1
    for net in (pair.model, pair.twin):
        param = next(net.parameters())
        param.data = param.data * 2
    pair.run_all(3, seed=2)
    assert logged.text.count(CAPTURED) == 2 and "elsewhere in memory" in logged.text


def test_shapes_share_memory(logged: pytest.LogCaptureFixture) -> None:
    """Captures of several shapes run in turns, with other work between them."""
    pair = Pair(MODELS["gpt2"])
    (batch,) = pair.case.batches(CUDA, torch.float32, 1)
    for _ in range(4):
        for rows in (4, 3, 2):
            pair.run({name: value[:rows] for name, value in batch.items()})
            torch.randn(1 << 20, device=CUDA).sort()
    assert logged.text.count(CAPTURED) == 3


def test_memory_does_not_grow() -> None:
    pair = Pair(MODELS["resnet"])
    pair.run_all(4)
    before = torch.cuda.memory_allocated(CUDA)
    pair.run_all(4)
    assert torch.cuda.memory_allocated(CUDA) <= before


class FromHost(nn.Module):
    """Moves its batch to the GPU by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x.to(CUDA)), labels.to(CUDA))


@pytest.mark.parametrize("on_host", [True, False])
def test_a_loader_that_pins_memory(on_host: bool, logged: pytest.LogCaptureFixture) -> None:
    """Its thread runs during captures too."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(80, 16), torch.randint(0, 10, (80,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=1)
    model = FromHost().to(CUDA)
    twin = copy.deepcopy(model)
    step = cf.compile(model, optimizer=ADAMW(model.parameters()), cuda_graph=True)
    plain = cf.compile(twin, optimizer=ADAMW(twin.parameters()), cuda_graph=False)
    for x, labels in loader:
        batch = (x, labels) if on_host else (x.to(CUDA, non_blocking=True), labels.to(CUDA, non_blocking=True))
        assert torch.equal(step(*batch), plain(*batch))
    assert logged.text.count(CAPTURED) == 1


ENDS = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn
import commfuse_fx as cf
from benchmarks.two_ranks import join_as_host_of_its_own
join_as_host_of_its_own()
how = sys.argv[1]
device = torch.device("cuda", 0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = cf.compile(model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer, cuda_graph=True)
x, y = torch.randn(8, 16, device=device), torch.randint(0, 10, (8,), device=device)

def leave(*args):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no launch")

for number in range(6):
    if number == 4 and dist.get_rank() == 1 and how in ("kill", "error"):
        step.session.graphs.replay = leave
    float(step(x, y))
print("ran", flush=True)
if how == "close":
    step.close()
if how in ("close", "destroy"):
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["close", "destroy", "live", "error", "kill"])
def test_how_programs_end(how: str, tmp_path: Path) -> None:
    """With a step that is closed or live: without a crash. If rank 1 leaves between vote and launch, rank 0 ends, too.

    No agent starts the ranks, since it would end rank 0.
    """
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (out, errors), _ = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if how in ("close", "destroy", "live"):
        assert [rank.returncode for rank in ranks] == [0, 0], errors[-4000:]
        assert "ran" in out
    else:
        assert ranks[0].returncode != 0 and ranks[1].returncode != 0
        assert "CollectiveError: rank 0: " in errors, errors[-4000:]
