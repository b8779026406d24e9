"""Models that iterate over sets: the same graph whatever order Python's hashes give them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.lowered import Lowered
from tests.distributed.harness import Ranks

NAMES = ("alpha", "beta", "gamma")


class Branches(nn.Module):
    """Branches of one input, over masks of which two are equal; they meet in the order of their names."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in NAMES})
        self.embed = nn.Linear(8, 8)
        for name in order:
            self.register_buffer(f"{name}_scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        masks = {name: x.new_ones(3, 3).tril() if name == "beta" else x.new_ones(3, 3) for name in self.order}
        out = {name: self.heads[name](masks[name] @ x).tanh() for name in self.order}
        for name in self.order:
            out[name] = out[name] * self.get_buffer(f"{name}_scale")
        return torch.cat([out[name] for name in NAMES], -1).square().mean()


class Conditions(nn.Module):
    """Another line for each item, and functions that are called by map()."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        for name in self.order:
            if name == "alpha":
                found[name] = x.sin() * self.weight
            elif name == "beta":
                found[name] = x.cos()
            else:
                found[name] = (x * 2).exp()
        moved = dict(zip(self.order, map(_rolled, (found[name] for name in self.order)), strict=True))
        return (moved["alpha"] - moved["beta"] / moved["gamma"]).square().mean()


def _rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1) + 1


class Penalties(nn.Module):
    """The first ops of the forward, on parameters that are used again; their gradients add up."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.named = dict(zip(NAMES, self.layer.parameters(), strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {name: self.named[name].square().sum() for name in self.order}
        return self.layer(x).square().mean() + torch.stack([found[name] for name in NAMES]).sum()


class ScaledWeights(nn.Module):
    """Products of one weight, which come before anything else that autograd sees."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {name: torch.arange(8.0) + len(name) for name in self.order}
        for name in self.order:
            found[name] = found[name] * self.layer.weight
        return self.layer(x).mean() + (found["alpha"] - found["beta"] * found["gamma"]).mean()


class Twins(nn.Module):
    """Branches that compute the same and are told apart by what becomes of them."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {name: (self.layer(x) * 1.0).relu() for name in self.order}
        return (found["alpha"] + 2 * found["beta"] - found["gamma"]).square().mean()


class Sum(nn.Module):
    """Rounds in another way for every order."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in NAMES})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.heads[name](x) for name in self.order), x.new_zeros(8)).square().mean()


class Draws(nn.Module):
    """Another mask for every order."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {name: F.dropout(x * self.weight, 0.1 * len(name)) for name in self.order}
        return (found["alpha"] - found["beta"] / found["gamma"]).square().mean()


def lower(model: nn.Module, *args: Any, **named: Any) -> tuple[str, str]:
    """Fingerprint, and text of the capture."""
    lowered = lowered_of(model, *args, **named)
    return lowered.fingerprint, lowered.stages["capture"].text()


def lowered_of(model: nn.Module, *args: Any, **named: Any) -> Lowered:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cf.compile(model, optimizer=optimizer, device_num=2, global_rank=0).lower(*args, **named)


@pytest.mark.parametrize("kind", [Branches, Conditions, Penalties, ScaledWeights, Twins])
def test_order_of_iteration_does_not_matter(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 8)
    found = [lower(kind(order), x) for order in permutations(NAMES)]
    assert found == [found[0]] * len(found)


@pytest.mark.parametrize("kind", [Sum, Draws])
def test_orders_that_are_other_numbers_stay_different(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 8)
    texts = [lower(kind(order), x)[1] for order in (NAMES, NAMES[::-1])]
    assert texts[0] != texts[1]


def test_gradients_are_those_of_eager() -> None:
    for order in permutations(NAMES):
        torch.manual_seed(0)
        model = Branches(order).double()
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        model(x).backward()
        wanted = {name: param.grad for name, param in model.named_parameters()}
        model.zero_grad()
        cf.compile(model, optimizer=None, loss_fn=lambda out, _: out, parallel_mode="stand_alone")(x, torch.zeros(()))
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, wanted[name], rtol=1e-12, atol=1e-14)


class Layers(nn.Module):
    """A program without a set: loops over layers, heads and two towers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x)) if i % 2 else layer(x)
            y = y.relu() + i
        heads = [(x[:, i : i + 2] * y[:, i : i + 2]).sum(1) for i in range(0, 8, 2)]
        return torch.stack([layer(x).mean() for layer in self.layers]).sum() + torch.stack(heads).mean()


def test_programs_without_a_set_keep_their_order() -> None:
    """Lines of one module are numbered in the order in which the program ran."""
    _, text = lower(Layers(), torch.randn(4, 8))
    called = [line.split("layers.")[1].split("/")[0] for line in text.splitlines() if " = aten.addmm" in line]
    assert called == [str(i) for i in (*range(12), *range(12))]
    slices = [
        line.split(", 1, ")[1] for line in text.splitlines() if line.startswith("fwd %/slice") and ", 1, " in line
    ]
    assert slices == [f"{i}, {i + 2})" for i in range(0, 8, 2) for _ in range(2)]


def of_this_seed() -> list[str]:
    """Models of Hugging Face that iterate over the set of their layers' types."""
    import transformers

    names = frozenset(NAMES)
    gemma = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        use_cache=False,
    )
    bert = transformers.ModernBertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        local_attention=4,
        global_attn_every_n_layers=2,
        pad_token_id=0,
    )
    ids = torch.ones(2, 8, dtype=torch.long)
    return [
        lowered_of(Branches(tuple(names)), torch.ones(2, 3, 8)).fingerprint,
        lowered_of(transformers.Gemma3ForCausalLM(gemma), input_ids=ids, labels=ids).fingerprint,
        lowered_of(transformers.ModernBertForMaskedLM(bert), input_ids=ids, labels=ids).fingerprint,
    ]


@pytest.mark.dist
def test_hugging_face_models_are_the_same_in_every_process(ranks: Ranks) -> None:
    """This one and two others, of other hash seeds."""
    assert ranks.values_of_other_seeds(of_this_seed) == [of_this_seed()] * 2
