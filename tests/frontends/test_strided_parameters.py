"""Parameters that are no block of memory of their own are updated as eager execution does, and nothing beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.ops.shared_memory import overlaps
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.oracle import ACROSS_STEPS, MakeOptimizer, by_class

pytestmark = pytest.mark.usefixtures("no_other_plan")

# How an 8 x 8 parameter lies in a tensor of 16 x 16.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chunk": lambda base: base[:8].chunk(2, 1)[0],
    "every second row": lambda base: base[::2, :8],
    "every second column": lambda base: base[:8, ::2],
    "transposed": lambda base: base[:8, :8].clone().t(),
    "padded rows": lambda base: base.as_strided((8, 8), (12, 1), 3),
    "rows that overlap": lambda base: base.as_strided((8, 8), (4, 1)),
}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": by_class(torch.optim.SGD, lr=0.05),
    "nesterov": by_class(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": by_class(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    "adam": by_class(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": by_class(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": by_class(torch.optim.Adagrad, lr=0.05, lr_decay=0.1, weight_decay=0.1),
    "rmsprop": by_class(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "nadam": by_class(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "radam": by_class(torch.optim.RAdam, lr=0.01),
    "adamax": by_class(torch.optim.Adamax, lr=0.01),
    "adadelta": by_class(torch.optim.Adadelta, lr=0.5),
    "asgd": by_class(torch.optim.ASGD, lr=0.05, t0=1, lambd=0.1),
    "rprop": by_class(torch.optim.Rprop, lr=0.01),
    "opaque": by_class(torch.optim.Adafactor, lr=0.01),
}

SEMI: dict[str, Any] = {"parallel_mode": "semi_auto", "full_batch": True}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"schedule": "none", "comm_fusion": {"openstate": False}},
    "across": ACROSS_STEPS,
    "semi": SEMI,
}


class Views(nn.Module):
    """Of one tensor, which is a buffer: a weight, and a number. Another layer is as usual."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        base = torch.randn(16, 16, dtype=dtype)
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.weight = nn.Parameter(LAYOUTS[layout](base))
        self.scale = nn.Parameter(base.view(-1)[250])
        self.register_buffer("base", base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((torch.tanh(self.first(x)) @ self.weight) * self.scale - 0.2).square().mean()


class Halves(nn.Module):
    """Two weights with rows in common, updated one after the other."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(12, 8, dtype=torch.float64)
        self.one, self.other = nn.Parameter(base[:8]), nn.Parameter(base[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.one) @ self.other - 0.2).square().mean()


def twin(model: nn.Module) -> nn.Module:
    """A copy in which parameters share the memory that they share in the model."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(copy.deepcopy(param.data, memo))
    return copy.deepcopy(model, memo)


def train(model: nn.Module, make: MakeOptimizer, mode: dict[str, Any], steps: int = 3) -> None:
    """On two ranks and eagerly; compares parameters, their neighbours in memory, and optimizer state."""
    reference = twin(model)
    eager = make(reference)
    world = LockstepWorld(cf.compile(model, optimizer=make(model), device_num=2, global_rank=0, **mode))
    for _ in range(steps):
        x = torch.randn(8, 8, dtype=next(model.parameters()).dtype)
        eager_step(reference, eager, x)
        world([(x,)] * 2 if mode is SEMI else [(x[:4],), (x[4:],)])
    for rank, optimizer in zip(world.models, world.optimizers, strict=True):
        assert_like(rank, reference)
        assert optimizer is not None
        torch.testing.assert_close(optimizer.state_dict()["state"], eager.state_dict()["state"])


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def assert_like(model: nn.Module, reference: nn.Module) -> None:
    for (name, have), (_, want) in zip(_named(model), _named(reference), strict=True):
        torch.testing.assert_close(have, want, msg=lambda text, name=name: f"{name}: {text}")


def _named(model: nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_layouts(layout: str, mode: str) -> None:
    train(Views(layout), OPTIMIZERS["adamw"], MODES[mode])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_optimizers(name: str, dtype: torch.dtype) -> None:
    train(Views("chunk", dtype), OPTIMIZERS[name], {})


@pytest.mark.parametrize("mode", MODES)
def test_parameters_with_rows_in_common(mode: str) -> None:
    """Weight decay makes the order of the two updates visible; the one must not wait for the next step."""
    train(Halves(), OPTIMIZERS["nesterov"], MODES[mode])


def test_strides_change_between_steps() -> None:
    """Parameter and state become others, as tensors of other strides or in place; then two share memory."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    reference = copy.deepcopy(model)
    optimizer, eager = (OPTIMIZERS["adamw"](each) for each in (model, reference))
    loss = nn.functional.mse_loss
    step = cf.compile(model, loss_fn=loss, optimizer=optimizer)
    base = torch.randn(8, 16, dtype=torch.float64)

    def gaps(params: Sequence[nn.Parameter], _: Any) -> None:
        params[0].data = base.clone()[:, ::2]

    def transposed(params: Sequence[nn.Parameter], _: Any) -> None:
        params[2].data = params[2].data.t()

    def state(params: Sequence[nn.Parameter], held: torch.optim.Optimizer) -> None:
        average = held.state[params[2]]["exp_avg"]
        held.state[params[2]]["exp_avg"] = average.t().contiguous().t()
        held.state[params[0]]["exp_avg"].data = torch.ones(8, 8, dtype=torch.float64)

    def shared(params: Sequence[nn.Parameter], _: Any) -> None:
        params[0].data = params[2].data

    def plain(params: Sequence[nn.Parameter], _: Any) -> None:
        params[0].data = base[:, :8].clone()

    for change in (None, gaps, transposed, state, shared, plain, state):
        if change is not None:
            with torch.no_grad():
                change(list(model.parameters()), optimizer)
                change(list(reference.parameters()), eager)
        for _ in range(2):
            x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
            step(x, y)
            eager.zero_grad()
            loss(reference(x), y).backward()
            eager.step()
        assert_like(model, reference)


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(torch.zeros(1).expand(8))
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(cf.CommFuseError, match=r"parameter bias of shape \[8\] and strides \[0\].*\.clone\(\)"):
        step(torch.randn(4, 8), torch.randn(4, 8))


def test_a_divided_parameter_has_memory_of_its_own() -> None:
    model = Halves()
    cf.shard(model.one, (None, "dp"))
    step = cf.compile(model, optimizer=OPTIMIZERS["sgd"](model), device_num=2, global_rank=0, **SEMI)
    with pytest.raises(cf.CommFuseError, match="parameter one is divided among ranks, but shares memory with other"):
        step.lower(torch.randn(8, 8, dtype=torch.float64))


class Columns(nn.Module):
    """Column-major weights, and a convolution with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.one, self.two = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
        self.one.weight.data = self.one.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(torch.relu(self.conv(x)).mean((2, 3)))
        return (self.two(torch.tanh(hidden)) - 0.3).square().mean()


@pytest.mark.parametrize("mode", [{}, ACROSS_STEPS], ids=["plain", "across"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_divided_parameters_that_are_not_row_major(name: str, mode: dict[str, Any]) -> None:
    model = Columns()
    reference = copy.deepcopy(model)
    cf.shard(model.one, weight=("dp", None))
    cf.shard(model.two, weight=(None, "dp"))
    cf.shard(model.conv, weight=("dp", None, None, None))
    eager = OPTIMIZERS[name](reference)
    optimizer = OPTIMIZERS[name](model)
    world = LockstepWorld(cf.compile(model, optimizer=optimizer, device_num=2, global_rank=0, **SEMI, **mode))
    for _ in range(3):
        x = torch.randn(4, 4, 6, 6, dtype=torch.float64)
        eager_step(reference, eager, x)
        world([(x,)] * 2)
    for rank in world.models:
        assert_like(rank, reference)


def test_who_shares_elements() -> None:
    base = torch.zeros(8, 8)
    left, right = base.chunk(2, 1)
    tensors = {"left": left, "right": right, "row": base[2], "alone": torch.zeros(3), "int": base.view(torch.int16)[7]}
    assert overlaps({"left": left, "right": right}) == {}
    assert overlaps({"even": base[::2], "odd": base[1::2]}) == {}
    found = overlaps(tensors)
    assert found["row"] == ("left", "right", "int")  # through those that it shares with
    assert "alone" not in found
