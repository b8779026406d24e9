"""Divided models on real Gloo ranks: data, tensor, sequence and mixed plans against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks

pytestmark = pytest.mark.dist

VOCABULARY, LENGTH, ROWS = 64, 16, 8


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options},
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def eager_gpt2() -> nn.Module:
    return gpt2(attn_implementation="eager")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8, vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2-eager": eager_gpt2,
    "llama": llama,
    "bert": bert,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of targets, one with none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = ids.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.3, -100)
        labels[0] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def mark(model: nn.Module, plan: str, axis: str) -> None:
    if plan in ("tensor", "vocabulary", "sequence"):
        options = {} if plan == "tensor" else {plan: True}
        cf.shard(model, cf.plans.tensor_parallel(model, axis=axis, **options))


def eager_training(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = made(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def divided_training(name: str, mesh: tuple[int, ...], plan: str, options: dict[str, Any]) -> Any:
    model = made(name)
    mark(model, plan, "tp" if len(mesh) > 1 else "dp")
    captures.share(model, (name, plan, mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = cf.compile(model, optimizer=optimizer, parallel_mode="semi_auto", mesh=mesh, full_batch=True, **options)
    losses = [float(step(**batch)) for batch in batches()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shapes = [optimizer.state[param]["exp_avg"].shape == param.shape for param in optimizer.state]
    return losses, state, all(shapes)


@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        ("gpt2", (2,), "data"),
        ("gpt2", (2,), "tensor"),
        ("gpt2", (2, 2), "sequence"),
        ("gpt2-eager", (2, 2), "vocabulary"),
        ("llama", (4,), "sequence"),
        ("bert", (2, 2), "sequence"),
    ],
)
def test_trains_as_one_device(ranks: Ranks, name: str, mesh: tuple[int, ...], plan: str) -> None:
    want_losses, want = eager_training(name)
    for losses, have, whole in ranks.values(divided_training, name, mesh, plan, {}, size=prod(mesh)):
        assert whole, "the optimizer's state has the shape of its parameter"
        for found, expected in zip(losses, want_losses, strict=True):
            assert abs(found - expected) < 2e-6  # the models of Hugging Face compute the loss in float32
        for key, value in want.items():
            torch.testing.assert_close(have[key], value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}, "cluster": "default"},
        {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "default"},
    ],
    ids=["optimal", "across-steps"],
)
def test_with_every_schedule(ranks: Ranks, options: dict[str, Any]) -> None:
    want_losses, want = eager_training("gpt2")
    for losses, have, _ in ranks.values(divided_training, "gpt2", (2, 2), "sequence", options, size=4):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=0, atol=2e-6)
        for key, value in want.items():
            torch.testing.assert_close(have[key], value, rtol=1e-5, atol=2e-6)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)]
    return nn.Sequential(*layers).double()


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator).double(), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(3)
    ]


def train_on_images(mesh: tuple[int, ...] | None, mark: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if mesh is None:
        for x, y in images():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    else:
        for pattern, strategies in mark.items():
            cf.shard(model, pattern, **strategies)
        step = cf.compile(
            model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer, parallel_mode="semi_auto", mesh=mesh,
            full_batch=True,
        )  # fmt: skip
        for x, y in images():
            step(x, y)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("mesh", "mark"),
    [((2,), {}), ((2, 2), {"0": {"weight": ("tp", None, None, None)}, "5": {"weight": (None, "tp")}})],
    ids=["data", "mixed"],
)
def test_statistics_are_those_of_the_whole_batch(ranks: Ranks, mesh: tuple[int, ...], mark: dict[str, Any]) -> None:
    want = train_on_images(None, {})
    for have in ranks.values(train_on_images, mesh, mark, size=prod(mesh)):
        for name, value in want.items():
            torch.testing.assert_close(have[name], value, rtol=1e-9, atol=1e-9)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


def with_dropout(mesh: tuple[int, ...], axis: str | None) -> list[float]:
    torch.manual_seed(0)
    model = Dropped()
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    if axis is not None:
        cf.shard(model.up.weight, (axis, None))
    torch.manual_seed(100 + cf.get_rank())  # the ranks' generators need not be alike
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(
        model, loss_fn=nn.MSELoss(), optimizer=optimizer, parallel_mode="semi_auto", mesh=mesh, full_batch=True
    )
    return [float(step(x, y)) for _ in range(3)]


def test_masks_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    (one,) = ranks.values(with_dropout, (1,), None, size=1)
    assert len(dict.fromkeys(one)) == 3
    for mesh, axis in (((4,), None), ((2, 2), "tp"), ((4,), "dp")):
        for found in ranks.values(with_dropout, mesh, axis, size=4):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(one), rtol=1e-5, atol=1e-6)


def own_rows(optimizer: bool) -> Any:
    """full_batch=False: ranks with another place on the data axis are handed other rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x, y = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    reference = copy.deepcopy(model)
    nn.MSELoss()(reference(x), y).backward()
    cf.shard(model[0], weight=("tp", None))
    made = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer else None
    step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=made, parallel_mode="semi_auto", mesh=(2, 2))
    place = cf.get_rank() // 2
    step(x[4 * place : 4 * place + 4], y[4 * place : 4 * place + 4])
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert want.grad is not None
        if optimizer:
            torch.testing.assert_close(param.detach(), want.detach() - want.grad)
        else:
            torch.testing.assert_close(param.grad, want.grad)
    return True


@pytest.mark.parametrize("optimizer", [True, False], ids=["whole-step", "gradients"])
def test_every_rank_brings_its_rows(ranks: Ranks, optimizer: bool) -> None:
    assert all(ranks.values(own_rows, optimizer, size=4))


def profiled() -> tuple[float, float]:
    """A profile in between changes nothing, and prices the step and another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    cf.shard(model[0], weight=("dp", None))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8)
    step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=optimizer, parallel_mode="semi_auto", full_batch=True)
    step(x, x)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = step.profile(x, x, rounds=1)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name])
    return step.lower(x, x).simulate(profile).step_seconds, float(step(x, x))


def test_a_divided_step_can_be_profiled(ranks: Ranks) -> None:
    (seconds, loss), (other, same) = ranks.values(profiled, size=2)
    assert 0 < seconds == other
    assert loss == same
