"""A collective that is left out of a divided step must be noticed, in its loss or its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld

Mark = Callable[[nn.Module], Any]


class Language(nn.Module):
    """GPT-2 that is called by position."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=1, n_embd=16, n_head=4, vocab_size=32, n_positions=8, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def language_batch() -> tuple[torch.Tensor, ...]:
    ids = torch.randint(0, 32, (4, 8))
    labels = ids.masked_fill(torch.rand(4, 8) < 0.4, -100)  # another number of targets on every rank
    return ids, labels


def plan(axis: str, **options: bool) -> Mark:
    return lambda model: cf.shard(model.model, cf.plans.tensor_parallel(model.model, axis=axis, **options))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def images() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 6, 6).double(), torch.randint(0, 4, (4,))


def rows() -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 8).double(), torch.randn(8, 4).double()


def nothing(model: nn.Module) -> None:
    pass


def by_counts(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    cf.shard(model[0].weight, (2, 2))
    cf.shard(model[2].weight, (1, 4))


@pytest.mark.parametrize(
    ("make", "batch", "loss_fn", "mark", "mesh", "openstate", "least"),
    [
        pytest.param(perceptron, rows, nn.MSELoss(), nothing, (4,), False, 3, id="mlp-data"),
        pytest.param(perceptron, rows, nn.MSELoss(), by_counts, (2, 2), False, 3, id="mlp-counts"),
        pytest.param(convolutions, images, nn.CrossEntropyLoss(), nothing, (2, 2), False, 5, id="convnet-data"),
        pytest.param(Language, language_batch, None, nothing, (2, 2), False, 3, id="gpt2-data"),
        pytest.param(Language, language_batch, None, nothing, (2, 2), True, 2, id="gpt2-data-fused"),
        pytest.param(Language, language_batch, None, plan("dp"), (4,), False, 4, id="gpt2-tensor"),
        pytest.param(
            Language, language_batch, None, plan("tp", vocabulary=True), (2, 2), False, 8, id="gpt2-vocabulary"
        ),
        pytest.param(Language, language_batch, None, plan("tp", sequence=True), (2, 2), False, 8, id="gpt2-sequence"),
    ],
)
def test_every_collective_matters(
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple[torch.Tensor, ...]],
    loss_fn: Any,
    mark: Mark,
    mesh: tuple[int, ...],
    openstate: bool,
    least: int,
) -> None:
    model = make().double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    arguments = batch()
    reference = copy.deepcopy(model)
    if loss_fn is None:
        want = reference(*arguments)
    else:
        want = loss_fn(reference(*arguments[:-1]), arguments[-1])
    want.backward()
    mark(model)
    step = cf.compile(
        model, {"openstate": openstate}, loss_fn=loss_fn, parallel_mode="semi_auto", mesh=mesh,
        device_num=4, full_batch=True, form="step")  # fmt: skip
    world = LockstepWorld(step)

    def agrees(*drop: str) -> bool:
        return all(
            torch.allclose(result.loss, want.detach(), rtol=1e-9)
            and all(
                torch.allclose(result.grads[name], param.grad, rtol=1e-7, atol=1e-11)
                for name, param in reference.named_parameters()
                if param.grad is not None
            )
            for result in world([arguments] * 4, drop=drop)
        )

    assert agrees()
    names = world.collectives(arguments)
    assert len(names) >= least
    unnoticed = [name for name in names if agrees(name)]
    assert not unnoticed, f"{len(names) - len(unnoticed)} of {len(names)} are noticed; not {unnoticed}"
