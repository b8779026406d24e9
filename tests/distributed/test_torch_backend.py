"""`torch.compile(model, backend="commfuse")` on several ranks."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commfuse_fx as cf
from commfuse_fx.frontends.torch_backend import commfuse
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import batch, grads
from tests.distributed.models_that_break import Block, Breaks
from tests.logs import logged

pytestmark = pytest.mark.dist

OPTIONS: dict[str, Any] = {"cpu_kernels": False}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).double()


def beside_ddp() -> None:
    """Models whose parameters have the same names, graphs that blocks and models share, and parts without a graph."""
    torch._dynamo.reset()
    models = [blocks()[:2], blocks()[:2], Breaks(), Breaks()]
    twins = copy.deepcopy(models)
    ours = [torch.compile(model, backend=commfuse, options=OPTIONS) for model in models]
    theirs = [nn.parallel.DistributedDataParallel(twin) for twin in twins]
    for calls in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        for rows in (4, 4, 5, 6):
            for call in calls:
                call(batch(rows, rows)).square().mean().backward()
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(grads(model), grads(twin), rtol=1e-10, atol=1e-10)
        for name, buffer in model.named_buffers():
            if name.startswith("python"):  # read by no graph
                continue
            held = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
            dist.all_gather(held, buffer)
            assert torch.equal(*held)


def test_the_backend_gives_what_ddp_gives(ranks: Ranks) -> None:
    ranks.values(beside_ddp)


def sums() -> None:
    """Sums, of backwards on top of each other, are the means times the number of ranks."""
    torch._dynamo.reset()
    model = Breaks()
    twin = copy.deepcopy(model)
    ours = torch.compile(model, backend=commfuse, options={**OPTIONS, "gradients_mean": False})
    theirs = nn.parallel.DistributedDataParallel(twin)
    for call in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            call(batch(step)).square().mean().backward()
    means = [None if grad is None else grad * dist.get_world_size() for grad in grads(twin)]
    torch.testing.assert_close(grads(model), means, rtol=1e-10, atol=1e-10)


def test_sums_of_gradients(ranks: Ranks) -> None:
    ranks.values(sums)


def compare(ours: Callable[[torch.Tensor], Any], model: nn.Module) -> None:
    """Gradients of two backwards that `ours` runs on the model, and those of a copy in DistributedDataParallel."""
    twin = copy.deepcopy(model)
    theirs = nn.parallel.DistributedDataParallel(twin)
    for step in range(2):
        torch.manual_seed(step)
        ours(batch(step))
        torch.manual_seed(step)
        theirs(batch(step)).square().mean().backward()
    torch.testing.assert_close(grads(model), grads(twin), rtol=1e-10, atol=1e-10)


def blocks_alone() -> list[str]:
    """Blocks that are compiled one by one, in a model that is not: what stands around them is reduced, too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *blocks(), nn.Linear(6, 2)).double()
    for block in model[1:4]:
        block.compile(backend=commfuse, options=OPTIONS)
    with logged() as messages:
        compare(lambda rows: model(rows).square().mean().backward(), model)
    return messages


def test_what_stands_around_compiled_blocks_is_reduced(ranks: Ranks) -> None:
    for messages in ranks.values(blocks_alone):
        assert any("3 other parameters got a gradient that no compiled graph has computed" in each for each in messages)


def compiled_loops() -> None:
    """Functions under torch.compile that call the backward, of a model of the backend and of a compiled module."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, other = blocks(), nn.Sequential(nn.Linear(6, 2), nn.Tanh()).double()
    compiled = cf.compile(other, cpu_kernels=False)
    loop = torch.compile(lambda rows: model(rows).square().mean().backward(), backend=commfuse, options=OPTIONS)
    compare(loop, model)
    compare(torch.compile(lambda rows: compiled(rows).square().mean().backward(), backend="eager"), other)


def test_functions_under_torch_compile_may_call_the_backward(ranks: Ranks) -> None:
    ranks.values(compiled_loops)


def in_fsdp() -> None:
    torch._dynamo.reset()
    model = Block()
    fully_shard(model)
    with pytest.raises(cf.ConfigValueError, match="a FSDPBlock of FSDP, which divides and reduces gradients"):
        torch.compile(model, backend=commfuse, options=OPTIONS)(torch.ones(4, 6))


def test_the_backend_refuses_fsdp(ranks: Ranks) -> None:
    ranks.values(in_fsdp)


def in_ddp() -> None:
    """Around a compiled model, before its graphs are there and afterwards; inside of it; and in a function with one."""
    for model in (Breaks(), blocks()):
        torch._dynamo.reset()
        inside = torch.compile(model, backend=commfuse, options=OPTIONS)
        if not isinstance(model, Breaks):
            inside(batch(0)).sum().backward()
        call = nn.parallel.DistributedDataParallel(inside)
        with pytest.raises(Exception, match="a second time"):
            call(batch(0))
    torch._dynamo.reset()
    wrapped = nn.parallel.DistributedDataParallel(Block().double())
    with pytest.raises(Exception, match="a second time"):
        torch.compile(wrapped, backend=commfuse, options=OPTIONS)(batch(0))
    torch._dynamo.reset()
    left_alone = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 2)).double())
    loop = torch.compile(lambda rows: left_alone(rows).square().mean(), backend=commfuse, options=OPTIONS)
    with pytest.raises(cf.ConfigValueError, match="both would reduce its gradients"):
        loop(batch(0))


def test_the_backend_refuses_ddp(ranks: Ranks) -> None:
    ranks.values(in_ddp)


def other_values() -> list[str]:
    """A backend sends no first values, but ranks that differ in them are told."""
    torch._dynamo.reset()
    model = blocks()
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    with logged() as messages:
        torch.compile(model, backend=commfuse, options=OPTIONS)(batch(0)).square().mean().backward()
    return messages


def test_other_first_values_are_noticed(ranks: Ranks) -> None:
    for messages in ranks.values(other_values):
        assert any("parameters differ between ranks" in message for message in messages)


def other_graphs() -> str:
    torch._dynamo.reset()
    model = Breaks() if dist.get_rank() else blocks()
    with pytest.raises(cf.PlanMismatchError) as error:
        torch.compile(model, backend=commfuse, options=OPTIONS)(batch(0)).square().mean().backward()
    return str(error.value)


def test_ranks_with_other_graphs_are_told(ranks: Ranks) -> None:
    for text in ranks.values(other_graphs):
        assert "use different parameters" in text


class Recurrent(nn.Module):
    """Dynamo makes no graph of a model that begins with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.out = nn.LSTM(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.state(x)[0])
        return found


class Disabled(Recurrent):
    forward = torch._dynamo.disable(Recurrent.forward)


class Plain(nn.Linear):
    """Of its code Dynamo makes one graph only, in the test."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.number = next(_numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number


_numbers = itertools.count(1)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="commfuse")
    return model


def unreduced(kind: str) -> tuple[list[str], list[list[float]]]:
    """What two steps of a model warn of, and its parameters on all ranks."""
    torch._dynamo.reset()
    cf.reset_auto_parallel_context()  # a warning may be given again
    torch.manual_seed(0)
    model: nn.Module = {"first": Recurrent, "many": Plain, "known": Plain, "inside": Recurrent}.get(kind, Disabled)()
    call: Any = model
    with logged(logging.WARNING) as messages, torch._dynamo.config.patch(recompile_limit=1):
        if kind == "ddp":
            call = nn.parallel.DistributedDataParallel(torch.compile(model, backend=commfuse))
        elif kind == "inside":
            call = torch.compile(nn.Sequential(cf.compile(model)), backend=commfuse)
        elif kind == "alone":
            call = torch.compile(model, backend="commfuse", options={"parallel_mode": "stand_alone"})
        elif kind == "in place":
            call = in_place(model)
        elif kind == "function":
            call = torch.compile(lambda x: model(x), backend=commfuse)
        elif kind == "many":
            for other in (Plain(), Plain()):
                torch.compile(other, backend=commfuse)(torch.ones(3, 4)).sum().backward()
            call = torch.compile(model, backend=commfuse)
        elif kind != "not compiled":
            call = torch.compile(model, backend=commfuse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            call(torch.full((3, 4), step + dist.get_rank() + 0.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each for each in messages if "rank's alone" in each], [p.flatten()[:3].tolist() for p in model.parameters()]


LEAVES_RECURRENCE = tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13)
"""Whether Dynamo leaves a model that begins with an LSTM to Python. PyTorch 2.15 makes a graph of what follows it."""


@pytest.mark.parametrize(
    "kind", [*(["first"] if LEAVES_RECURRENCE else []), "disabled", "in place", "function", "many"]
)
def test_a_model_of_which_no_graph_holds_anything_is_told(kind: str, ranks: Ranks) -> None:
    (one, first), (other, second) = ranks.values(unreduced, kind)
    assert first != second, "nothing has reduced"
    for messages in (one, other):
        assert len(messages) == 1 and 'Use cf.compile(model, capture="dynamo")' in messages[0]


@pytest.mark.parametrize("kind", ["known", "inside", "ddp", "alone", "not compiled"])
def test_no_model_is_told_that_is_reduced_or_trains_alone(kind: str, ranks: Ranks) -> None:
    (one, first), (other, second) = ranks.values(unreduced, kind)
    assert not one and not other
    assert (first == second) == (kind not in ("alone", "not compiled"))
