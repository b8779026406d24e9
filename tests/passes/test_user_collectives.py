"""Collectives written in a model: results and gradients against plain formulas on one device, and their fusion."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures
from tests.models import randomised

Tensors = list[torch.Tensor]
OFF = {"openstate": False}


def reference(kind: str, values: Tensors, dim: int = 0, op: str = "sum", src: int = 0) -> Tensors:
    """What every rank gets when rank r gives values[r]."""
    world = len(values)
    total = torch.stack(values).sum(0) / (world if op == "avg" else 1)
    if kind == "all_reduce":
        return [total] * world
    if kind == "broadcast":
        return [values[src]] * world
    if kind == "all_gather":
        return [torch.cat(values, dim)] * world
    if kind == "all_to_all":
        return [torch.cat([value.chunk(world, dim)[rank] for value in values], dim) for rank in range(world)]
    assert kind == "reduce_scatter"
    total = total.movedim(dim, 0)
    rows = -(-total.shape[0] // world)
    padded = torch.cat([total, total.new_zeros(rows * world - total.shape[0], *total.shape[1:])])
    return [part.movedim(0, dim) for part in padded.chunk(world)]


class Talking(nn.Module):
    """Something learnt before and after a collective; each rank weighs its result in its own way."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.after = nn.Linear(8, 8)
        self.kind = kind
        self.settings = settings

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.before(x))

    def finish(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = x.flatten()
        return (
            torch.tanh(self.after.bias.sum() + x * self.after.weight.flatten()[: x.numel()]) * weights[: x.numel()]
        ).sum()

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.finish(getattr(cf.ops, self.kind)(self.prepare(x), **self.settings), weights)


def make(kind: str, world: int, rows: int = 4, **settings: Any) -> tuple[Talking, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    model = randomised(Talking(kind, **settings)).double()
    width = 8 * rows * world
    model.after.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))
    return model, [(torch.randn(rows, 6).double(), torch.randn(width).double()) for _ in range(world)]


def one_device(model: Talking, batches: Sequence[tuple[torch.Tensor, ...]]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Every rank's loss, and the gradients of the mean of the losses."""
    model = copy.deepcopy(model)
    settings = {key: value for key, value in model.settings.items() if key != "fusion"}
    results = reference(model.kind, [model.prepare(x) for x, _ in batches], **settings)
    losses = [model.finish(result, weights) for result, (_, weights) in zip(results, batches, strict=True)]
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], _grads(model)


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def lockstep(model: nn.Module, world: int, comm_fusion: Any = None) -> LockstepWorld:
    """Models of one class with equal attributes share a capture."""
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    captures.share(model, (type(model), repr(own)))
    return LockstepWorld(cf.compile(model, comm_fusion, device_num=world, global_rank=0, form="step"))


def assert_one_device(model: Talking, batches: Sequence[tuple[torch.Tensor, ...]], comm_fusion: Any = None) -> None:
    losses, grads = one_device(model, batches)
    for rank, result in enumerate(lockstep(model, len(batches), comm_fusion)(batches)):
        torch.testing.assert_close(result.loss, losses[rank], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(dict(result.grads), grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("all_reduce", {}),
        ("all_reduce", {"op": "avg"}),
        ("all_gather", {}),
        ("all_gather", {"dim": 1}),
        ("reduce_scatter", {}),
        ("reduce_scatter", {"op": "avg", "dim": 1}),
        ("broadcast", {}),
        ("all_to_all", {}),
        ("all_to_all", {"dim": 1}),
    ],
    ids=str,
)
def test_gradients(kind: str, settings: dict[str, Any], world: int) -> None:
    assert_one_device(*make(kind, world, **settings))


def test_broadcast_from_another_rank() -> None:
    assert_one_device(*make("broadcast", 4, src=2))


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_scatter_of_rows_that_do_not_divide(rows: int, op: str) -> None:
    assert_one_device(*make("reduce_scatter", 4, rows=rows, op=op))


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_other_reductions_have_values_but_no_gradients(op: str) -> None:
    class Detached(Talking):
        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                extra = cf.ops.all_reduce(self.prepare(x), op)
            return self.finish(self.prepare(x), weights) + extra.sum()

    torch.manual_seed(0)
    model = Detached("all_reduce").double()
    batches = [(torch.randn(4, 6).double(), torch.randn(64).double()) for _ in range(2)]
    values = torch.stack([model.prepare(x) for x, _ in batches]).detach()
    want = {"max": values.amax(0), "min": values.amin(0), "product": values.prod(0)}[op].sum()
    own = [model.finish(model.prepare(x), weights).detach() for x, weights in batches]
    for result, loss in zip(lockstep(model, 2)(batches), own, strict=True):
        torch.testing.assert_close(result.loss, loss + want)


# Fusion


class Several(nn.Module):
    """Two collectives that do not depend on each other, on tensors of different shapes."""

    def __init__(self, talk: Callable[..., torch.Tensor], rows: int = 4, **settings: Any) -> None:
        super().__init__()
        self.one = nn.Linear(6, 3)
        self.two = nn.Linear(6, 5)
        self.talk = talk
        self.rows = rows
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.talk(torch.tanh(self.one(x)), **self.settings)
        two = self.talk(torch.tanh(self.two(x))[: self.rows], **self.settings)
        return (one.sin().sum(0) * torch.arange(3.0)).sum() + (two.cos().sum(0) * torch.arange(5.0)).sum()


def _count(world: LockstepWorld, batch: Any, kind: str, phase: str) -> list[int]:
    found = world.step.lower(*batch).collectives
    return sorted(len(each.members) for each in found if (each.kind, each.phase) == (kind, phase))


def _inputs(world: int) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 6),) for _ in range(world)]


KIND_OF_BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce"}
SIZE = {kind: {"mode": "size", "config": 1} for kind in ("allgather", "reducescatter", "allreduce")}


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("settings", "comm_fusion", "fused"),
    [
        pytest.param({"fusion": 1}, None, True, id="attribute"),
        pytest.param({}, None, True, id="auto"),
        pytest.param({"fusion": None}, None, True, id="none-follows-the-mode"),
        pytest.param({}, SIZE, True, id="size"),
        pytest.param({"fusion": 0}, None, False, id="never"),
        pytest.param({"fusion": 1}, OFF, False, id="off"),
    ],
)
def test_fusion_of_gathers_and_scatters(
    kind: str, world: int, settings: dict[str, Any], comm_fusion: Any, fused: bool
) -> None:
    model = Several(getattr(cf.ops, kind), rows=3 if kind == "reduce_scatter" else 4, **settings)
    batches = _inputs(world)
    plain = lockstep(copy.deepcopy(model), world, OFF)
    ranks = lockstep(model, world, comm_fusion)
    for each, phase in ((kind, "forward"), (KIND_OF_BACKWARD[kind], "backward")):
        assert _count(ranks, batches[0], each, phase) == ([2] if fused else [1, 1])
        assert _count(plain, batches[0], each, phase) == [1, 1]
    for mine, other in zip(ranks(batches), plain(batches), strict=True):
        exact = {"rtol": 0.0, "atol": 0.0} if world == 2 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(mine.loss, other.loss, **exact)
        torch.testing.assert_close(dict(mine.grads), dict(other.grads), **exact)


def test_different_ids_stay_apart() -> None:
    class Apart(Several):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cf.ops.all_gather(self.one(x), fusion=1).sum() + cf.ops.all_gather(self.two(x), fusion=2).sum()

    assert _count(lockstep(Apart(cf.ops.all_gather), 2), _inputs(2)[0], "all_gather", "forward") == [1, 1]


class Chains(nn.Module):
    """A -> B and C -> D: B needs the result of A, D that of C."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.one = nn.Linear(6, 3)
        self.two = nn.Linear(6, 5)
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in (self.one, self.two):
            first = cf.ops.all_reduce(torch.tanh(layer(x)), **self.settings)
            total = total + cf.ops.all_reduce(torch.sin(first), **self.settings).cos().sum()
        return total


@pytest.mark.parametrize("settings", [{"fusion": 7}, {}], ids=["attribute", "auto"])
def test_dependent_chains_give_two_nodes(settings: dict[str, Any]) -> None:
    model, batches = Chains(**settings), _inputs(2)
    ranks, plain = lockstep(copy.deepcopy(model), 2), lockstep(model, 2, OFF)
    assert _count(ranks, batches[0], "all_reduce", "forward") == [2, 2]
    for mine, other in zip(ranks(batches), plain(batches), strict=True):
        assert torch.equal(mine.loss, other.loss)
        assert all(torch.equal(mine.grads[name], other.grads[name]) for name in other.grads)


def test_the_same_tensor_is_reduced_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            return (cf.ops.all_reduce(x) * cf.ops.all_reduce(x)).sum() + cf.ops.all_reduce(x, "max").detach().sum()

    model, batches = Twice(), _inputs(2)
    total = torch.stack([torch.tanh(model.layer(x)) for (x,) in batches])
    want = (total.sum(0) ** 2).sum() + total.amax(0).sum()
    ranks = lockstep(model, 2)
    assert len([each for each in ranks.step.lower(*batches[0]).collectives if each.phase == "forward"]) == 2
    for result in ranks(batches):
        torch.testing.assert_close(result.loss, want.detach())


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
def test_tensors_without_elements_take_no_part(kind: str) -> None:
    class WithNothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return F.mse_loss(x, torch.ones_like(x)) + getattr(cf.ops, kind)(x[:0]).sum()

    batches = _inputs(2)
    ranks = lockstep(WithNothing(), 2)
    assert [each.phase for each in ranks.step.lower(*batches[0]).collectives] == ["backward"]
    for result in ranks(batches):
        assert bool(result.loss.isfinite()) and all(bool(grad.isfinite().all()) for grad in result.grads.values())


def test_a_users_collective_may_share_a_bucket_with_gradients() -> None:
    """The gradient of an all_reduce in the forward is one in the backward, like those of parameters."""
    model, batches = make("all_reduce", 2, op="avg")
    found = lockstep(copy.deepcopy(model), 2).step.lower(*batches[0]).collectives
    params = dict(model.named_parameters())
    mixed = [each for each in found if each.phase == "backward" and any(name not in params for name in each.members)]
    assert len(mixed) == 1 and any(name in params for name in mixed[0].members)
    assert_one_device(model, batches)
