"""A compiled module that computes values again in its backward has the gradients of eager PyTorch, whatever it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.calls import module_session
from commfuse_fx.cost.memory import bytes_of, peak_memory
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.halves import crossing
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.rewrite.recompute import Recompute
from commfuse_fx.runtime.execute import executor


class Net(nn.Module):
    """Activations of many ops, a norm of the model's own, and dropout; returns a loss and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(32))
        self.register_buffer("seen", torch.zeros(32))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.045 * h.pow(3))))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale + self.seen
        self.seen += h.detach().mean(0)
        out = self.last(self.dropout(h)).tanh()
        return out.square().mean(), out


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Values are computed again on this CPU too. Inductor compiles nothing, and no gradient of zeros stands in."""
    with (
        mock.patch.object(Recompute, "when", return_value=Recompute(on_cpu=True)),
        mock.patch.object(executor, "compiled_regions", return_value={}),
        mock.patch.object(module_session, "refuse_zeros", mock.Mock(side_effect=AssertionError("zeros"))),
    ):
        yield


def made() -> tuple[cf.CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    return cf.compile(model, backend="inductor", cpu_kernels=False), twin


def saved(program: Program) -> int:
    roots = Roots(program.graph, program.aliases())
    kept = dict.fromkeys(roots[node] for node in crossing(program))
    return sum(bytes_of(info(root).spec) for root in kept if root.op == "call_function")


def test_less_is_saved_between_forward_and_backward() -> None:
    module, twin = made()
    x = torch.randn(8, 16, dtype=torch.float64)
    program = module.lower(x).program
    with mock.patch.object(Recompute, "when", return_value=None):
        other = cf.compile(twin, backend="inductor", cpu_kernels=False).lower(x).program
    assert saved(program) < 0.7 * saved(other)
    assert peak_memory(program) < 0.7 * peak_memory(other), "the predicted peak knows it"
    assert [note.topic for note in program.notes].count("computed again") == 1


@pytest.mark.parametrize("used", ["loss", "out", "both"])
def test_gradients_are_those_of_eager_pytorch(used: str) -> None:
    module, twin = made()
    for seed in range(4):
        for each in (module, twin):
            torch.manual_seed(seed)
            x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
            loss, out = each(x)
            total = {"loss": loss, "out": out.sum(), "both": loss + out.sin().sum()}[used]
            total.backward(retain_graph=seed == 1)
            if seed == 1:
                total.backward()
            if seed == 2:
                each.zero_grad()
            each.given = x.grad
        torch.testing.assert_close(module.given, twin.given, rtol=1e-12, atol=1e-12)
        for param, other in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(module.seen, twin.seen, rtol=1e-12, atol=1e-12)


def test_a_step_trains_as_eager_pytorch_does() -> None:
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin))
    step = cf.compile(model, optimizer=ours, form="step", has_aux=True, backend="inductor", cpu_kernels=False)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(8, 16, dtype=torch.float64)
        loss, _ = step(x)
        torch.manual_seed(seed)
        x = torch.randn(8, 16, dtype=torch.float64)
        theirs.zero_grad()
        expected, _ = twin(x)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-12)
