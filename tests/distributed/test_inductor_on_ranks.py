"""Ranks whose compute Inductor compiles: gradients are those of DDP, and collectives run in the order of the plan."""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import commfuse_fx as cf
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.ops.regions import regions_of
from commfuse_fx.runtime.execute import executor
from commfuse_fx.runtime.execute.wire.wire import Wire
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.loops_of_modules import batch, grads

pytestmark = pytest.mark.dist


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


ran: list[str] = []


def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        ran.append(name)
        return function(*args, **kwargs)

    return call


def bind(wire: Wire, node: Any, original: Any = Wire.bind) -> Any:
    found = original(wire, node)
    return noted(info(node).name, found) if is_start(node) or is_wait(node) else found


def regions(program: Any, rank: int, original: Any = executor.compiled_regions) -> Any:
    return {number: noted(f"region {number}", code) for number, code in original(program, rank).items()}


def in_order(step: cf.CompiledStep | cf.CompiledModule, *args: Any) -> list[str]:
    """Starts and waits as the plan has them, and the regions, each where its last node is."""
    program = step.lower(*args).program
    ends = {region.nodes[-1]: f"region {region.number}" for region in regions_of(program)}
    names = (info(node).name if is_start(node) or is_wait(node) else ends.get(node) for node in program.graph.nodes)
    return [name for name in names if name]


def train() -> list[str]:
    """A step and a module train as DDP does, and run what their plans have; returns that of the step."""
    models = [Blocks() for _ in range(3)]
    options: dict[str, Any] = {"backend": "inductor", "comm_fusion": {"openstate": False}}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with mock.patch.object(Wire, "bind", bind), mock.patch.object(executor, "compiled_regions", regions):
        step = cf.compile(models[0], loss_fn=nn.functional.mse_loss, optimizer=optimizers[0], **options)
        calls = [cf.compile(models[1], **options), nn.parallel.DistributedDataParallel(models[2])]
        for number in range(2):
            x, target = batch(number), batch(number + 5)
            ran.clear()
            step(x, target)
            assert ran == in_order(step, x, target)
            for call, optimizer in zip(calls, optimizers[1:], strict=True):
                optimizer.zero_grad()
                ran.clear()
                nn.functional.mse_loss(call(x), target).backward()
                optimizer.step()
                if call is calls[0]:
                    assert ran == in_order(call, x) and sum("all_reduce" in name for name in ran) == 6
            torch.testing.assert_close(grads(models[1]), grads(models[2]), rtol=1e-12, atol=1e-12)
    for model in models[:2]:
        torch.testing.assert_close([*model.parameters()], [*models[2].parameters()], rtol=1e-12, atol=1e-12)
    return in_order(step, x, target)


class Layer(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.power = power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.power


def compiles(powers: list[float]) -> tuple[int, int]:
    """Gradients are those of DDP; returns how many regions this rank has compiled, and how many it found on disk."""
    torch.manual_seed(0)
    counters.clear()
    model = nn.Sequential(*map(Layer, powers)).double()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    module = cf.compile(model, backend="inductor", inductor_regions="layers", cpu_kernels=False)
    for call in (module, twin):
        call(batch(0)).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(twin.module), rtol=1e-12, atol=1e-12)
    found = counters["aot_autograd"]
    return found["autograd_cache_miss"], found["autograd_cache_hit"]


def test_ranks_of_a_host_compile_each_region_once(ranks: Ranks) -> None:
    powers = [random.SystemRandom().random() for _ in range(2)]  # numbers that no code on disk knows
    done = ranks.values(compiles, powers)
    (regions,) = {misses + hits for misses, hits in done}
    assert 2 <= sum(misses for misses, _ in done) <= regions and all(misses for misses, _ in done)
    assert [misses for misses, _ in ranks.values(compiles, powers)] == [0] * len(done), "it is kept"


def test_ranks_train_as_with_ddp_and_send_in_the_order_of_the_plan(ranks: Ranks) -> None:
    first, *others = ranks.values(train)
    assert all(other == first for other in others)
    assert sum("all_reduce" in name for name in first) == 6 and sum("region" in name for name in first) > 2


def partly_compiled() -> str:
    """A step trains as DDP does; returns which of its nodes are compiled, and why others are not."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Linear(6, 6)
    model = nn.Sequential(*layers).double()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    options: dict[str, Any] = {"backend": "inductor", "comm_fusion": {"openstate": False}}
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizers[0], **options)
    for number in range(2):
        x, target = batch(number), batch(number + 5)
        step(x, target)
        optimizers[1].zero_grad()
        nn.functional.mse_loss(twin(x), target).backward()
        optimizers[1].step()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=1e-12, atol=1e-12)
    lowered = step.lower(x, target)
    return lowered.text() + lowered.explain().text().partition("compiled regions")[2]


def test_ranks_agree_about_what_runs_op_by_op(ranks: Ranks) -> None:
    first, *others = ranks.values(partly_compiled)
    assert all(other == first for other in others)
    assert "{region 0}" in first and "run op by op, as no two of their ops can share a kernel" in first


def killed_in_a_compile() -> str:
    """Rank 1 is killed while it holds the lock of a region; what the others see."""

    def compile_region(module: Any, examples: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda given: module(*given)

    step = cf.compile(Blocks(), loss_fn=nn.functional.mse_loss, backend="inductor")
    with mock.patch("torch._inductor.compile_fx.compile_fx", compile_region):
        try:
            step(batch(0), batch(1))
        except cf.CollectiveError as error:
            return str(error)
    return ""


def test_a_rank_that_is_killed_while_it_compiles_ends_the_step_on_the_others(ranks: Ranks) -> None:
    first, gone = run_soon(ranks, killed_in_a_compile, size=2)
    assert gone.died == -signal.SIGKILL
    assert first.ok and "no vote has come from rank 1, and the connection to that rank has closed" in first.value, first
