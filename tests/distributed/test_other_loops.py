"""Training loops that call models in ways of their own give what they give with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import assert_as_ddp
from tests.distributed.models_of_modules import gpt2

pytestmark = pytest.mark.dist

Wrap = Callable[[nn.Module], Any]


def batch(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layers(*sizes: int) -> nn.Sequential:
    made = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*made[:-1]).double()


def gan(wrap: Wrap) -> list[torch.Tensor]:
    """Two models, two optimizers; the discriminator judges one fake twice, and lets its gradient through."""
    maker, judge = layers(4, 6), layers(6, 8, 1)
    make, judges = wrap(maker), wrap(judge)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (maker, judge)]
    for step in range(3):
        fake = make(batch(step, 5, 4))
        optimizers[1].zero_grad()
        F.softplus(-judges(batch(step + 10, 5, 6))).mean().backward()
        F.softplus(judges(fake.detach())).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-judges(fake)).mean().backward()
        optimizers[0].step()
    return [*maker.parameters(), *judge.parameters()]


def truncated_recurrence(wrap: Wrap) -> list[torch.Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
            out, state = self.rnn(x, state)
            return self.head(out), state

    model = Net().double()
    wrapped, state = wrap(model), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        x = batch(step, 3, 2, 4)
        out, state = wrapped(x, state)
        state = tuple(each.detach() for each in state)
        optimizer.zero_grad()
        F.mse_loss(out, x).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
    assert state is not None
    return [*model.parameters(), *state]


def penalty_in_forward(wrap: Wrap) -> list[torch.Tensor]:
    """Where a gradient of a gradient belongs; the first layers are checkpointed the old way."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.net = layers(6, 6), layers(6, 8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out, (slope.norm(dim=1) - 1).square().mean()

    model = Net()
    wrapped, optimizer = wrap(model), torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(3):
        out, penalty = wrapped(batch(step, 5, 6))
        optimizer.zero_grad()
        (out.square().mean() + 0.1 * penalty).backward()
        optimizer.step()
    return [*model.parameters()]


def lbfgs_and_average(wrap: Wrap) -> list[torch.Tensor]:
    """The optimizer calls the module; an average of its weights runs along."""
    model = layers(6, 8, 6)
    wrapped, optimizer = wrap(model), torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def closure(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x), x)
        loss.backward()
        return cf.ops.all_reduce(loss.detach(), op="avg")

    for step in range(2):
        optimizer.step(partial(closure, batch(step, 5, 6)))
        average.update_parameters(wrapped.module)
    return [*model.parameters(), *average.parameters()]


def momentum_encoder(wrap: Wrap) -> list[torch.Tensor]:
    """A queue in a buffer, and a second encoder that follows the first one in forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
            self.key.requires_grad_(False)
            self.register_buffer("queue", torch.randn(8, 4))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            query = self.query(a)
            with torch.no_grad():
                for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    other.data = other.data * 0.9 + one.data * 0.1
                key = self.key(b)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
            self.queue[(self.place + torch.arange(len(key))) % 8] = key
            self.place.copy_((self.place + len(key)) % 8)
            return logits

    model = Net().double()
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        logits = wrapped(batch(step, 3, 6), batch(step + 10, 3, 6))
        F.cross_entropy(logits, torch.zeros(3, dtype=torch.long)).backward()
        optimizer.step()
    return [*model.parameters(), *(model.buffers() if dist.get_rank() == 0 else ())]


def checkpointed_norm(wrap: Wrap) -> list[torch.Tensor]:
    """Activation checkpointing changes the statistics of a batch norm a second time, in the backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(F.dropout(checkpoint(self.body, x, use_reentrant=False), 0.2, self.training))
            return out

    model = Net().double()
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch(step, 5, 6)).square().mean().backward()
        optimizer.step()
    wrapped.eval()
    with torch.no_grad():  # with rank 0's statistics
        return [*model.parameters(), wrapped(batch(9, 5, 6)), *model.buffers()]


def returned_loss(wrap: Wrap) -> list[torch.Tensor]:
    """A Hugging Face model computes its loss itself, and its logits are looked at."""
    model = gpt2().inner.double()
    wrapped, optimizer, seen = wrap(model), torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(2):
        ids = batch(step, 3, 8).mul(100).long().abs() % 32
        optimizer.zero_grad()
        out = wrapped(input_ids=ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        seen += [out.loss, out.logits]
    return [*model.parameters(), *seen]


LOOPS = [
    gan,
    truncated_recurrence,
    penalty_in_forward,
    lbfgs_and_average,
    momentum_encoder,
    checkpointed_norm,
    returned_loss,
]


def compare(number: int) -> None:
    found = []
    for wrap in (lambda net: cf.compile(net, cpu_kernels=False), nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        found.append([each.detach().clone() for each in LOOPS[number](wrap)])
    assert_as_ddp(*found)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_gives_what_ddp_gives(ranks: Ranks, number: int, size: int) -> None:
    ranks.values(compare, number, size=size)
