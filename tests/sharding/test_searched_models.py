"""Searched strategies of unusual models, by prices that find many kinds of strategies, compute what one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.planning import compile_call
from tests.models import Case
from tests.sharding.divided_oracle import compare


class Experts(nn.Module):
    """Every row goes through all experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 4), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(x), -1)
        hidden = torch.relu(torch.einsum("bi,eio->beo", x, self.up))
        return torch.einsum("beo,eoi,be->bi", hidden, self.down, weights)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(16, 8), nn.RNN(8, 8, batch_first=True), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embed(tokens))[0]).transpose(1, 2)


class Heads(nn.Module):
    """Attention with reshapes of what may be divided, and an embedding that is the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))
        return (x @ self.embed.weight.t()).transpose(1, 2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(self.groups(self.second(x)).flatten(1))


def masked(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that count, with a term of its own for the logits."""
    loss = F.cross_entropy(output, labels, reduction="none")
    mask = (labels % 3 != 0).to(loss.dtype)
    return (loss * mask).sum() / mask.sum().clamp(min=1) + 1e-3 * output.logsumexp(1).square().mean()


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(16, (rows, 2)), torch.randint(16, (rows, 2))


CASES = [
    Case("experts", Experts, lambda rows: (torch.randn(rows, 8), torch.randn(rows, 8)), F.mse_loss),
    Case("recurrent", Recurrent, tokens, masked),
    Case("heads", Heads, tokens, masked),
    Case("images", Images, lambda rows: (torch.randn(rows, 4, 4, 4), torch.randint(4, (rows,))), coupled=True),
]

MARKS: dict[str, Callable[[nn.Module], object]] = {
    "experts": lambda model: cf.shard(model, "up", ("tp", None, None)),
    "recurrent": lambda model: cf.shard(model, "head.weight", ("tp", None)),
    "heads": lambda model: cf.shard(model, "qkv.weight", {"tp": "S(0;3)"}),
    "images": lambda model: cf.shard(model, "first.weight", ("tp", None, None, None)),
}


def cluster(flops: float, memory: float, bandwidth: float) -> ClusterSpec:
    """Parts of the rates of a preset, with no latency, which would decide everything for small models."""
    found = resolve_cluster("gloo-1gbit")
    device = replace(
        found.device,
        op_overhead=0.0,
        collective_overhead=0.0,
        flops={dtype: rate * flops for dtype, rate in found.device.flops.items()},
        memory_bandwidth=found.device.memory_bandwidth * memory,
    )
    levels = tuple(replace(level, alpha=0.0, bandwidth=level.bandwidth * bandwidth) for level in found.levels)
    return replace(found, device=device, levels=levels)


PRICES = {
    "slow links": (cluster(1.0, 1.0, 0.1), 0),
    "slow flops": (cluster(1e-6, 1.0, 1.0), 0),
    "slow memory": (cluster(1.0, 1e-6, 1.0), 0),
    "little memory": (cluster(1.0, 1.0, 1.0), 1 << 20),
}
"""With the bytes to be saved."""


SEARCHES = [
    ("dynamic_programming", (2,), "slow memory"),
    ("recursive_programming", (2, 2), "slow flops"),
    ("recursive_programming", (2, 2), "little memory"),
    ("sharding_propagation", (2, 2), "slow links"),
]


@pytest.mark.parametrize(("mode", "mesh", "prices"), SEARCHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_device(
    case: Case, mode: str, mesh: tuple[int, ...], prices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, saving = PRICES[prices]
    only = Variants((Variant.of(saving=saving),))
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: only)
    mark = MARKS[case.name] if mode == "sharding_propagation" else lambda model: None
    options = {"parallel_mode": "auto", "search_mode": mode, "cluster": costs}
    found = compare(case, mesh, mark, gradients=False, steps=2, **options)
    assert [note for note in found.program.notes if note.topic == "search"]


class OneScore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.score = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(torch.relu(self.hidden(x))).squeeze(1)


def test_a_dimension_of_a_weight_that_the_model_squeezes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("one score", OneScore, lambda rows: (torch.randn(rows, 8), torch.randn(rows)), F.mse_loss)
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: Variants((Variant.of(),)))
    found = compare(case, (2,), gradients=False, steps=1, parallel_mode="auto", cluster=PRICES["slow memory"][0])
    assert "score.weight" in found.layouts()
