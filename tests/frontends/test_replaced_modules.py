"""Modules and parameters that are replaced, added or removed between steps: the step trains the model as it is now."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures
from tests.models import shards
from tests.oracle import ACROSS_STEPS, APART_ACROSS_STEPS, assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.act: nn.Module = nn.LeakyReLU(0.1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.paths = nn.ModuleDict({"wide": nn.Linear(8, 8), "narrow": nn.Tanh()})
        self.head: nn.Module = nn.Linear(8, 2)
        self.register_buffer("offset", None)
        self.register_parameter("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.embed(x))
        for block in self.blocks:
            x = x + block(x)
        for path in self.paths.values():
            x = path(x)
        for extra in (self.offset, self.shift):
            x = x if extra is None else x + extra
        return self.head(x)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def head(net: Net) -> None:
    net.head = nn.Linear(8, 2)


def head_of_another_class(net: Net) -> None:
    net.head = Doubled(8, 2)


def deeper_head(net: Net) -> None:
    net.head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def activation(net: Net) -> None:
    net.act = nn.Tanh()


def activation_of_the_same_class(net: Net) -> None:
    net.act = nn.LeakyReLU(0.7)


def block_added(net: Net) -> None:
    net.blocks.append(nn.Linear(8, 8))


def block_removed(net: Net) -> None:
    del net.blocks[0]


def block_used_twice(net: Net) -> None:
    net.blocks[1] = net.blocks[0]


def order(net: Net) -> None:
    net.paths["wide"] = net.paths.pop("wide")


def parameter_added(net: Net) -> None:
    net.shift = nn.Parameter(torch.randn(8))


def parameter_replaced(net: Net) -> None:
    net.embed.weight = nn.Parameter(torch.randn(8, 8))


def parameter_of_another_shape(net: Net) -> None:
    net.head.bias = nn.Parameter(torch.randn(1))


def parameter_tied(net: Net) -> None:
    net.blocks[1].weight = net.blocks[0].weight


def parameter_removed(net: Net) -> None:
    net.embed.bias = None


def buffer_added(net: Net) -> None:
    net.offset = torch.randn(8)


Edit = Callable[[Net], None]

EDITS: dict[Edit, str] = {
    head: "module head was replaced",
    head_of_another_class: "module head was replaced",
    deeper_head: "module head was replaced",
    activation: "module act was replaced",
    activation_of_the_same_class: "module act was replaced",
    block_added: "module blocks.2 was added",
    block_removed: "module blocks.0 was replaced",
    block_used_twice: "module blocks.1 was replaced",
    order: "the order of modules changed",
    parameter_added: "parameter shift was added",
    parameter_replaced: "",
    parameter_of_another_shape: "parameter head.bias was replaced",
    parameter_tied: "parameter blocks.1.weight was replaced",
    parameter_removed: "parameter embed.bias was removed",
    buffer_added: "buffer offset was added",
}
each_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
    "opaque": lambda params: torch.optim.Adafactor(params, lr=0.1),
}

PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"schedule": "none"},
    "index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [2]}}},
    "across": ACROSS_STEPS,
    "apart-across": APART_ACROSS_STEPS,
}
# Every edit with communication that runs on into the next step, and with one of the other plans in turn.
OTHERS = ["auto", "none", "index", "apart-across"]
TURNS = [(edit, name) for i, edit in enumerate(EDITS) for name in ("across", OTHERS[i % len(OTHERS)])]


def make() -> Net:
    torch.manual_seed(0)
    net = Net().double()
    captures.share(net, Net)
    return net


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    double = {"dtype": torch.float64, "generator": generator}
    return [(torch.randn(4, 8, **double), torch.randn(4, 2, **double)) for _ in range(count)]


def change(edit: Edit, net: Net, optimizer: torch.optim.Optimizer | None = None) -> None:
    """As a user does it: the optimizer's param group then has the parameters that the model has."""
    torch.manual_seed(2)
    edit(net)
    net.double()
    captures.share(net, (Net, edit))  # what its modules compute may be another thing now
    if optimizer is not None:
        optimizer.param_groups[0]["params"] = list(net.parameters())


def plain_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    F.mse_loss(net(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("edit", "steps_before", "kind"),
    [*((edit, 0, "sgd") for edit in EDITS), *((edit, 2, "adamw") for edit in EDITS), (head, 2, "opaque")],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_whole_steps(edit: Edit, steps_before: int, kind: str) -> None:
    net, reference = make(), make()
    optimizer, plain = OPTIMIZERS[kind](net.parameters()), OPTIMIZERS[kind](reference.parameters())
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer)
    for number, batch in enumerate(batches(steps_before + 2)):
        if number == steps_before:
            change(edit, net, optimizer)
            change(edit, reference, plain)
        step(*batch)
        plain_step(reference, plain, batch)
    assert_same([net], [reference])


@each_edit
def test_gradients_and_evaluation(edit: Edit) -> None:
    net = make()
    step = cf.compile(net, loss_fn=F.mse_loss)
    (batch,) = batches(1)
    step(*batch)
    net.eval()
    step(*batch)
    net.train()
    change(edit, net)
    net.zero_grad()
    reference = copy.deepcopy(net)
    loss = F.mse_loss(reference(batch[0]), batch[1])
    loss.backward()
    torch.testing.assert_close(step(*batch), loss.detach())
    assert_same([net], [reference], gradients=True)
    net.eval()
    torch.testing.assert_close(step(*batch), loss.detach())


@pytest.mark.parametrize(("edit", "plan"), TURNS, ids=lambda value: getattr(value, "__name__", value))
def test_two_ranks(edit: Edit, plan: str, no_other_plan: None) -> None:
    net, reference = make(), make()
    optimizer, plain = OPTIMIZERS["adamw"](net.parameters()), OPTIMIZERS["adamw"](reference.parameters())
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, device_num=2, **PLANS[plan])
    world = LockstepWorld(step)
    for number, batch in enumerate(batches(5)):
        if number == 2:
            assert world.is_pending == ("across" in plan)
            for model, made in zip(world.models, world.optimizers, strict=True):
                assert isinstance(model, Net)
                change(edit, model, made)
            change(edit, reference, plain)
        world(shards(batch, 2))
        plain_step(reference, plain, batch)
    assert_same(world.models, [reference] * 2)


def retraced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "commfuse_fx.retrace"]


@each_edit
def test_the_cause_is_logged(edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    net = make()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer)
    first, second = batches(2)
    step(*first)
    change(edit, net, optimizer)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        step(*second)
    assert retraced(caplog) == ([f"re-tracing: {EDITS[edit]}"] if EDITS[edit] else [])


def test_a_module_that_comes_back_finds_its_graph(caplog: pytest.LogCaptureFixture) -> None:
    net = make()
    step = cf.compile(net, loss_fn=F.mse_loss)
    (batch,) = batches(1)
    heads = net.head, Doubled(8, 2).double()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for number in range(4):
            net.head = heads[number % 2]
            torch.testing.assert_close(step(*batch), F.mse_loss(net(batch[0]), batch[1]).detach())
    assert len(retraced(caplog)) == 1


def test_what_was_replaced_is_let_go() -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    net = make()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer)
    first, second = batches(2)
    step(*first)
    old = net.head.weight
    gone = weakref.ref(old)
    del optimizer.state[old], old
    change(head, net, optimizer)
    step(*second)
    gc.collect()
    assert gone() is None


def test_an_optimizer_that_still_holds_the_old_parameters_is_refused() -> None:
    net = make()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer)
    (batch,) = batches(1)
    for edit in (head, parameter_replaced):
        step(*batch)
        change(edit, net)
        with pytest.raises(cf.ConfigValueError, match=r"of param group 0 .* is not a parameter of the model"):
            step(*batch)
        optimizer.param_groups[0]["params"] = list(net.parameters())


def test_an_optimizer_that_goes_over_to_other_parameters() -> None:
    net, reference = make(), make()
    made = [torch.optim.SGD(each.head.parameters(), lr=0.1) for each in (net, reference)]
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=made[0])
    for batch in batches(2):
        step(*batch)
        plain_step(reference, made[1], batch)
        for each, optimizer in zip((net, reference), made, strict=True):
            optimizer.param_groups[0]["params"] = list(each.embed.parameters())
    assert_same([net], [reference])


def test_layers_of_a_divided_step() -> None:
    """In place of marked layers others come whose sizes do not divide, while the step's parameters are divided."""

    def layers(width: int) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(8, width).double(), nn.Linear(width, 8).double()

    first, last = layers(16)
    net = nn.Sequential(first, nn.ReLU(), last)
    reference = copy.deepcopy(net)
    cf.shard(first, weight=("tp", None))
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (net, reference))
    options = {"parallel_mode": "semi_auto", "mesh": (1, 2), "device_num": 2}
    world = LockstepWorld(cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, **options))
    for number in range(4):
        if number == 2:
            for model, its in (*zip(world.models, world.optimizers, strict=True), (reference, plain)):
                torch.manual_seed(3)
                assert its is not None
                model[0], model[2] = layers(5)
                its.param_groups[0]["params"] = list(model.parameters())
        batch = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
        world([batch, batch])
        plain_step(reference, plain, batch)
    assert_same(world.models, [reference] * 2)
