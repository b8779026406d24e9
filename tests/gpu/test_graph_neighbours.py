"""Captured steps beside a capture that fails, graphs of PyTorch, streams of the user, and what PyTorch keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.gpu.device_models import MODELS, WITH_DROPOUT
from tests.gpu.graph_pairs import ADAMW, CAPTURED, CUDA, Pair

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("logged")]


class Peeks(torch.autograd.Function):
    """Looks at a value on the host, in a way that a trace does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.commfuse_test.peek(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@torch.library.custom_op("commfuse_test::peek", mutates_args=())
def peek(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if float(x.sum()) > 1e9 else 1.0)


@peek.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(Peeks.apply(F.dropout(self.inner(x), 0.1)), labels)


def test_a_step_that_cannot_be_captured_runs_without(logged: pytest.LogCaptureFixture) -> None:
    """After a capture that failed the device is as good as before: it draws numbers, frees memory and captures."""
    other = Pair(MODELS["mlp"])
    other.run_all(3)
    model = Peeking().to(CUDA)
    twin = copy.deepcopy(model)
    step = cf.compile(model, optimizer=ADAMW(model.parameters()))
    plain = cf.compile(twin, optimizer=ADAMW(twin.parameters()), cuda_graph=False)
    for batch in MODELS["mlp"].batches(CUDA, torch.float32, 6):
        state = torch.cuda.get_rng_state(CUDA)
        want = plain(**batch)
        torch.cuda.set_rng_state(state, CUDA)
        assert torch.equal(step(**batch), want)
    assert logged.text.count("steps run without CUDA graphs from here on: capturing one failed") == 1
    other.run_all(3)
    before = torch.cuda.memory_reserved(CUDA)
    block = torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    block.record_stream(torch.cuda.Stream(CUDA))
    del block
    torch.cuda.synchronize()
    torch.rand(2, device=CUDA).sum().item()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(CUDA) <= before
    pair = Pair(MODELS["gpt2"])
    pair.run_all()
    assert pair.graphs.ended == ""


def test_captures_when_all_others_have_gone(logged: pytest.LogCaptureFixture) -> None:
    """PyTorch refuses a pool of memory whose graphs have gone while somebody holds some of it."""
    pair = Pair(MODELS["gpt2"])
    for seed in range(3):
        pair.run_all(3, seed=seed)
        for net in (pair.model, pair.twin):
            param = next(net.parameters())
            param.data = param.data.clone()
    assert logged.text.count(CAPTURED) == 3


def test_workspaces_that_others_free() -> None:
    """As `torch.compile(mode="reduce-overhead")` does. What is freed is written to, and graphs go on."""
    pair = Pair(MODELS["gpt2"])
    stream = torch.cuda.Stream(CUDA)
    for seed in range(3):
        pair.run_all(2, seed=seed)
        torch._C._cuda_clearCublasWorkspaces()
        for each in (torch.cuda.current_stream(CUDA), stream):
            with torch.cuda.stream(each):
                blocks = [torch.full((1 << size,), 255, dtype=torch.uint8, device=CUDA) for size in range(10, 27)]
        torch.cuda.synchronize()
        del blocks


def test_graphs_of_pytorch_beside_ours() -> None:
    """A graph that the user captures draws from the same generator, and so do steps before and after it."""
    pair = Pair(WITH_DROPOUT["gpt2"])
    pair.run_all(3)
    graph, drawn = torch.cuda.CUDAGraph(), torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        drawn.uniform_()
    seen = []
    for seed in range(3):
        graph.replay()
        seen.append(drawn.tolist())
        pair.run_all(1, seed=seed)
    assert len({tuple(each) for each in seen}) == 3


def test_steps_on_a_stream_of_the_users(logged: pytest.LogCaptureFixture) -> None:
    """Captured on one stream and run on others, each of which waits for the one before."""
    pair = Pair(WITH_DROPOUT["gpt2"])
    streams = [torch.cuda.Stream(CUDA) for _ in range(3)]
    for number, batch in enumerate(pair.case.batches(CUDA, torch.float32, 9)):
        stream, present = streams[number // 3], torch.cuda.current_stream(CUDA)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            pair.run(batch)
            torch.randn(1 << 20, device=CUDA).sort()
        present.wait_stream(stream)
    assert logged.text.count(CAPTURED) == 1
