"""Conjugates are computed where they stand: collectives and what reads memory do not look at a bit that asks for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf


class Conjugates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.real(x), self.imag(x))
        return self.read(z.clone())

    def read(self, z: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Parts(Conjugates):
    """Of a conjugate whose memory has gaps, and of one that is repeated without memory of its own."""

    def read(self, z: torch.Tensor) -> torch.Tensor:
        every_other, row = z.conj()[:, ::2], z[:1].conj().expand(6, 8)
        return every_other.imag.exp() + every_other.reshape(-1, 2).real.sum() + (row.imag * row.real)[:, 1::2]


class Written(Conjugates):
    def read(self, z: torch.Tensor) -> torch.Tensor:
        z.conj().add_(1j)
        z.imag.mul_(2)
        return z.abs() + z.conj().imag


@pytest.mark.parametrize("kind", [Parts, Written])
def test_a_step_is_that_of_eager_execution(kind: type[Conjugates]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(6, 4).double()
    reference = copy.deepcopy(model)
    y = torch.randn_like(reference(x))
    expected = F.mse_loss(reference(x), y)
    expected.backward()
    step = cf.compile(model, loss_fn=F.mse_loss)
    torch.testing.assert_close(step(x, y), expected.detach())
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    targets = {node.target for node in step.lower(x, y).graph_module.graph.nodes}
    assert not targets & {torch.ops.aten._conj.default, torch.ops.aten._neg_view.default}
