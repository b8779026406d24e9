"""What passes declare of numbers holds: ranks run steps before and after each pass, and compare what they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.passes.declaration import PassContext, Situation, Variant
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.planning.pipeline.registry import PASSES
from tests.oracle import ACROSS, OPTIMAL, SLOW
from tests.passes.cases import assert_same, outcome

PLAIN = Variant()
NUMERICS = ("bitwise", "reordered", "defines")


class Tied(nn.Module):
    """An embedding that is looked up and multiplied with, and layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2048, 256)
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(self.words(tokens)), self.words.weight)


def convnet() -> nn.Module:
    convolutions = [
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Zoo:
    """A step whose passes are looked at one by one. variant: the way to plan it."""

    model: Callable[[], nn.Module]
    loss_fn: Callable[..., torch.Tensor]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    options: dict[str, Any]
    variant: Variant = PLAIN
    mark: Callable[[nn.Module], Any] = lambda model: None


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16), torch.arange(4)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 2048, (2, 8)), torch.randint(0, 2048, (2, 8))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.arange(8) % 4


BY_COST = {"comm_fusion": OPTIMAL, "cluster": SLOW}
ZOO = {
    "convnet": Zoo(convnet, F.cross_entropy, images, {"device_num": 3}),
    "within": Zoo(Tied, token_loss, tokens, {"device_num": 2, **BY_COST}, Variant.of(postponed=1.0, resent=True)),
    "across": Zoo(
        Tied, token_loss, tokens, {"device_num": 2, **BY_COST, "schedule": ACROSS}, Variant.of(postponed=1.25)
    ),
    "divided": Zoo(
        two_layers,
        F.cross_entropy,
        rows,
        {"mesh": (1, 2), "device_num": 2, "parallel_mode": "semi_auto"},
        mark=lambda model: cf.shard(model[0], weight=("tp", None)),
    ),
}


def check_declarations(zoo: Zoo) -> list[str]:
    """Run the passes of a step one by one, and the step before and after each. Returns those that changed it."""
    model = zoo.model()
    zoo.mark(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = cf.compile(model, loss_fn=zoo.loss_fn, optimizer=optimizer, **zoo.options)
    captured = step.planner.read(step.planner.take_apart(zoo.batch(), {})).captured
    assert captured is not None
    config = captured.config
    pipeline = build_pipeline(Situation(config, captured.mesh, zoo.variant), PassContext.of(config))
    program, before, changed = captured, None, []
    for number, each in enumerate(pipeline.passes):
        compared = each.numerics != "defines"
        if compared and before is None:
            before = outcome(program)
        (record,) = pipeline.run(program, part=slice(number, number + 1))
        if not record.modified:
            continue
        changed.append(each.name)
        after = outcome(program) if compared else None
        if before is not None and after is not None:
            assert_same(before, after, each.numerics == "bitwise", each.name)
        before = after
    return changed


@pytest.mark.parametrize("name", ZOO)
def test_a_step_computes_what_each_pass_declares(name: str) -> None:
    changed = check_declarations(ZOO[name])
    assert {*CHANGED[name].split()} <= {*changed}


CHANGED = {
    "convnet": "simplify channels_last gradients_first fuse_collectives flatten_storage lower_average reinplace",
    "within": "resend_rows postpone_gradients fuse_collectives flatten_storage lower_average schedule vote_first",
    "across": "postpone_gradients fuse_collectives flatten_storage split_updates schedule give_way",
    "divided": "gradients_first fuse_collectives overlap reinplace",
}
"""Passes that are looked at in each step. The cases in text look at every pass."""


def test_a_wrong_declaration_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChannelsLast, "numerics", "bitwise")
    with pytest.raises(AssertionError, match="channels_last"):
        check_declarations(ZOO["convnet"])


def test_every_pass_declares_its_numerics() -> None:
    assert {entry.name: entry.make.numerics for entry in PASSES.values() if entry.make.numerics not in NUMERICS} == {}
