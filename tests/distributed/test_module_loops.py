"""A loop gives around a compiled module what it gives around DistributedDataParallel: the same bits, if sums agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import (
    LOOPS,
    Net,
    accumulation,
    assert_as_ddp,
    batch,
    evaluation,
    grads,
    local_gradients,
    part_of_the_output,
    plain,
    sgd,
    siamese,
    through_one_forward,
)
from tests.distributed.models_of_modules import MODELS

pytestmark = pytest.mark.dist


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net() if name == "net" else MODELS[name]().double()


def compare(number: int, options: dict[str, Any], name: str = "net") -> int:
    loop = LOOPS[number]
    model = made(name)
    twin = copy.deepcopy(model)
    captures.share(model, name, any_mesh=True)
    wrapped = cf.compile(model, **options)
    other = nn.parallel.DistributedDataParallel(twin)
    torch.manual_seed(3 + dist.get_rank())
    state = torch.get_rng_state()
    ours = list(loop(wrapped, model))
    torch.set_rng_state(state)
    theirs = list(loop(other, twin))
    by_hand = loop in (
        siamese,
        through_one_forward,
    )  # what DistributedDataParallel cannot do is summed in another order
    exact = dist.get_world_size() <= 2 and not options.get("cpu_kernels", True) and not by_hand
    torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-10)
    return len(ours)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_gives_what_ddp_gives(ranks: Ranks, number: int, size: int) -> None:
    assert min(ranks.values(compare, number, {"cpu_kernels": False}, size=size))


DIVIDED = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"level": 3, "parallel_optimizer_threshold": 0, "pad": True},
}


def all_divided() -> int:
    """All loops where ranks hold rows, but for one in which they run backwards as they please; and other models."""
    numbers = [number for number, loop in enumerate(LOOPS) if loop is not local_gradients]
    ours, theirs = (list(scaled("mlp", wrap)) for wrap in (divided, nn.parallel.DistributedDataParallel))
    assert_as_ddp(ours, theirs)
    others = [compare(0, DIVIDED, name) for name in ("convnet", "gpt2", "experts")]
    return min(*(compare(number, DIVIDED) for number in numbers), *others)


def divided(model: nn.Module) -> cf.CompiledModule:
    return compiled(model, **DIVIDED)


def test_loops_and_models_are_those_of_ddp_where_parameters_are_divided(ranks: Ranks) -> None:
    assert min(ranks.values(all_divided))


BRIEFLY = ("bert", "llama", "mlp", "convnet")
"""Models that are traced as gpt2 is, or of layers as the net has them, which go through all loops."""


def all_of(name: str) -> None:
    """All loops one after the other, a parameter that nobody uses, uneven numbers of batches, and float32."""
    for number, loop in enumerate(LOOPS):
        if name in BRIEFLY and loop not in (plain, accumulation, evaluation, siamese, part_of_the_output):
            continue
        try:
            assert compare(number, {"cpu_kernels": False}, name)
        except Exception as error:
            raise AssertionError(f"{name} in {loop.__name__}") from error
    for loop in (unused, uneven, scaled):
        assert_as_ddp(*(list(loop(name, wrap)) for wrap in (compiled, nn.parallel.DistributedDataParallel)))


def compiled(model: nn.Module, **options: Any) -> cf.CompiledModule:
    return cf.compile(model, cpu_kernels=False, **options)


def unused(name: str, wrap: Callable[..., Any]) -> Iterator[Any]:
    """One parameter is used on rank 1 only, and another one nowhere."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made(name)
            self.spare, self.never = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x: torch.Tensor, spares: bool) -> torch.Tensor:
            out: torch.Tensor = self.model(self.spare(x) if spares else x)
            return out

    model = Spare()
    call = wrap(model, find_unused_parameters=True)
    torch.manual_seed(3 + dist.get_rank())
    for step in range(2):
        call(batch(step).requires_grad_(), dist.get_rank() == 1).square().mean().backward()
        yield grads(model)


def uneven(name: str, wrap: Callable[..., Any]) -> Iterator[Any]:
    """Rank 0 has more batches than the others."""
    model = made(name)
    captures.share(model, name, any_mesh=True)
    call, optimizer = wrap(model), sgd(model)
    torch.manual_seed(3 + dist.get_rank())
    with call.join():
        for step in range(3 if dist.get_rank() == 0 else 2):
            optimizer.zero_grad()
            call(batch(step)).square().mean().backward()
            optimizer.step()
    yield list(model.parameters())


def scaled(name: str, wrap: Callable[..., Any]) -> Iterator[Any]:
    """Float32, and then autocast with a scaler that skips the step in which one rank has an infinity."""
    model = made(name).float()
    call, optimizer, scaler = wrap(model), sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.manual_seed(3 + dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step > 0, cache_enabled=False):
            loss = call(batch(step, dtype=torch.float32)).float().square().mean()
        scaler.scale(loss * (torch.inf if (step, dist.get_rank()) == (2, 1) else 1)).backward()
        yield [None if grad is None else grad.nan_to_num() for grad in grads(model)]
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale(), list(model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_kinds(ranks: Ranks, name: str) -> None:
    ranks.values(all_of, name)
