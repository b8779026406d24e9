"""Models whose forward writes to parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class Writes(nn.Module):
    """Two layers, a teacher that no optimizer has, and vectors of a power iteration; `write` changes some of them."""

    def __init__(self, write: Callable[[Writes], object], after: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.teacher = copy.deepcopy(self.up).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(4, 8), requires_grad=False)
        self.u = nn.Parameter(F.normalize(torch.randn(8), dim=0), requires_grad=False)
        self.register_buffer("v", F.normalize(torch.randn(4), dim=0))
        self.register_buffer("average", torch.zeros(8, 4))
        self._write, self._after = write, after
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if not self._after:
            with torch.no_grad():
                self._write(self)
        hidden = self.up(x)
        loss = self.down(hidden.tanh()).square().mean() + (hidden - self.teacher(x)).square().mean()
        loss = loss + (x @ self.turned * self.u + F.linear(x, self.average)).mean() + self.v.dot(self.down.bias)
        if self._after:
            with torch.no_grad():
                self._write(self)
        out: Tensor = loss
        return out


def clip(model: Writes) -> None:
    model.up.weight.clamp_(-0.1, 0.1)
    model.down.bias.data.clamp_(-0.1, 0.1)


def average(model: Writes) -> None:
    for mine, other in zip(model.teacher.parameters(), model.up.parameters(), strict=True):
        mine.mul_(0.9).add_(other, alpha=0.1)
    model.get_buffer("average").lerp_(model.up.weight, 0.1)


def rows(model: Writes) -> None:
    model.up.weight[0] = 0.5
    model.up.weight[-3:, 1] += 1.0
    model.up.bias[2:5] = model.down.bias[:3]
    model.down.weight.t()[1].fill_(0.25)
    model.turned.index_copy_(1, torch.tensor([5, 1]), model.turned[:, :2] * 2)


def norms(model: Writes) -> None:
    model.up.weight.div_(model.up.weight.norm(dim=1, keepdim=True))
    model.down.weight.sub_(model.down.weight.mean()).div_(model.down.weight.norm(dim=0, keepdim=True))


def power(model: Writes) -> None:
    v = model.get_buffer("v")
    v.copy_(F.normalize(model.up.weight.t() @ model.u, dim=0))
    model.u.copy_(F.normalize(model.up.weight @ v, dim=0))


def copies(model: Writes) -> None:
    """Into another layout, and each into the other."""
    model.turned.copy_(model.up.weight.t())
    held = model.teacher.weight.clone()
    model.teacher.weight.copy_(model.up.weight)
    model.up.weight.copy_(held)


def lists(model: Writes) -> None:
    params = [model.up.weight, model.down.weight, model.up.bias]
    torch._foreach_mul_(params, 0.9)
    torch._foreach_add_(params, 0.01)


WRITES: dict[str, Callable[[Writes], object]] = {
    each.__name__: each for each in (clip, average, rows, norms, power, copies, lists)
}
