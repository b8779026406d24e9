"""Steps that run from CUDA graphs, and when they are captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.gpu.device_models import MODELS
from tests.gpu.graph_pairs import ADAMW, CAPTURED, CUDA, Pair
from tests.gpu.step_checks import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("logged")]


SHARED = {"gpt2": torch.float64, "resnet": torch.float64}
"""The dtypes in which Inductor has compiled these models for other tests; compiling takes long."""


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_computes_what_a_step_without_one_does(
    name: str, backend: str, logged: pytest.LogCaptureFixture
) -> None:
    dtype = SHARED.get(name, torch.float32) if backend == "inductor" else torch.float32
    losses = Pair(MODELS[name], dtype=dtype, backend=backend).run_all()
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
