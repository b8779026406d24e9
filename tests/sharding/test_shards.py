"""Parameters that a step keeps divided: to the user they stay what they were."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.runtime.memory.layout import dividing, joined_group, part_of, whole_of
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.sharding.elementwise import (
    ACROSS,
    ONE_AXIS,
    OPTIMIZERS,
    TWO_AXES,
    Layouts,
    assert_close,
    batch,
    divide,
    eager,
    eager_step,
    make_step,
    values,
)

LAYOUTS = [
    (("tp", S(0)),),
    (("tp", S(1)), ("dp", R), ("pp", S(1))),
    (("pp", S(0)), ("tp", S(0))),
    (("tp", S(0, 3)), ("pp", S(1))),
    (("tp,pp", S(0)),),
    (("pp", S(0, 3)), ("tp", S(0, 1))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("devices", [None, (3, 1, 0, 2, 7, 6, 5, 4)])
def test_the_whole_from_the_parts(layout: Any, devices: Any) -> None:
    mesh = Mesh((2, 2, 2), ("dp", "tp", "pp"), devices)
    whole = torch.arange(12 * 8).reshape(12, 8)
    kept = dividing(layout, mesh)
    for rank in range(8):
        members = mesh.ranks(joined_group(kept, mesh), rank)
        parts = [part_of(whole, kept, mesh, member) for member in members]
        assert sum(part.numel() for part in parts) == whole.numel()
        assert torch.equal(whole_of(parts, kept, mesh, rank, whole.shape), whole)


@pytest.mark.parametrize("layout", [(("pp", S(0)),), (("tp", S(1)), ("pp,dp", S(0))), (("dp", S(0)), ("tp", S(0)))])
def test_rows_that_do_not_divide_are_padded_with_zeros(layout: Any) -> None:
    mesh = Mesh((2, 2, 2), ("dp", "tp", "pp"))
    whole = torch.arange(1, 13 * 8 + 1).reshape(13, 8)
    for rank in range(8):
        members = mesh.ranks(joined_group(layout, mesh), rank)
        parts = [part_of(whole, layout, mesh, member) for member in members]
        assert len({part.shape for part in parts}) == 1 and sum(part.sum() for part in parts) == whole.sum()
        assert torch.equal(whole_of(parts, layout, mesh, rank, whole.shape), whole)


CASES: list[tuple[tuple[int, ...], Layouts]] = [((2, 2), ONE_AXIS), ((1, 2, 2), TWO_AXES), ((2, 2, 2), TWO_AXES)]


class Pair:
    """A lockstep world, and one device that trains on the same batches."""

    def __init__(self, mesh: tuple[int, ...], layouts: Layouts, optimizer: str = "adamw", **options: Any) -> None:
        self.step = make_step(layouts, mesh, optimizer, **options)
        self.world = LockstepWorld(self.step)
        self.model, self.optimizer = eager(optimizer)
        self.steps = 0
        self.options = options

    def train(self, rows: int = 4) -> None:
        mesh = self.step.mesh
        of = [mesh.index("dp", rank) for rank in range(mesh.world)]
        batches = [batch(self.steps, data)[:rows] for data in range(mesh.shape[0])]
        self.world([(batches[data],) for data in of])
        eager_step(self.model, self.optimizer, batches)
        self.steps += 1
        assert self.world.is_pending == ("schedule" in self.options)

    def memory(self, rank: int = 0) -> dict[str, int]:
        """Bytes of each of the user's parameters on a rank, without touching them."""
        with torch._C.DisableTorchFunctionSubclass():
            named = self.world.models[rank].named_parameters()
            return {name: param.untyped_storage().nbytes() for name, param in named}

    def shards(self) -> list[Shards]:
        """Those of the last step, by rank."""
        return [rank.shards for rank in self.world._ranks if rank.shards is not None]

    def everyone(self, action: Callable[[nn.Module, Any], Any]) -> list[Any]:
        return [action(m, o) for m, o in zip(self.world.models, self.world.optimizers, strict=True)]

    def check(self) -> None:
        want = values(self.model, self.optimizer)
        for have in self.everyone(values):
            assert_close(have, want)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(("mesh", "layouts"), CASES, ids=str)
def test_trains_as_one_device(mesh: tuple[int, ...], layouts: Layouts, optimizer: str) -> None:
    pair = Pair(mesh, layouts, optimizer)
    for _ in range(3):
        pair.train()
    pair.check()
    for _ in range(2):
        pair.train()
    pair.check()


def test_between_steps_there_is_no_memory_for_the_whole() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    memory = pair.memory()
    assert memory["a"] == memory["b"] == memory["d"] == 0 and memory["e"] > 0
    model, optimizer = pair.world.models[0], pair.world.optimizers[0]
    assert optimizer is not None
    states = optimizer.state[model.a]
    assert list(states) and states["exp_avg"].shape == (8, 6)
    with torch._C.DisableTorchFunctionSubclass():
        assert states["exp_avg"].untyped_storage().nbytes() == 0
    shards = pair.shards()[0]
    assert shards.parts()["a"].shape == (4, 6) and shards.parts()["a/exp_avg"].shape == (4, 6)
    # None of this looks at values.
    assert model.a.shape == (8, 6) and model.a.requires_grad and float(states["step"]) == 1
    optimizer.zero_grad()
    assert shards.is_divided
    assert model.a.sum().isfinite() and not shards.is_divided
    assert type(model.a) is nn.Parameter and pair.memory()["a"] == 8 * 6 * 8
    pair.train()
    assert shards.is_divided and pair.memory()["a"] == 0
    assert all(each == 0 for name, each in pair.memory(1).items() if name in ONE_AXIS)


READS: dict[str, Any] = {
    "a parameter": lambda model, optimizer: model.a.sum(),
    "state_dict": lambda model, optimizer: {k: v.clone() for k, v in model.state_dict().items()},
    "optimizer state": lambda model, optimizer: optimizer.state_dict()["state"][0]["exp_avg"].sum(),
    "a copy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "saving": lambda model, optimizer: torch.save((model.state_dict(), optimizer.state_dict()), io.BytesIO()),
    "saving parameters": lambda model, optimizer: torch.save(list(model.parameters()), io.BytesIO()),
    "an eager forward": lambda model, optimizer: model(torch.ones(2, 3, dtype=torch.float64)),
    "printing": lambda model, optimizer: repr(model.d),
    "numpy": lambda model, optimizer: model.b.detach().numpy().copy(),
}


@pytest.mark.parametrize("how", list(READS))
def test_reading_gathers(how: str) -> None:
    pair = Pair((2, 2), ONE_AXIS)
    for _ in range(3):
        pair.train()
        pair.everyone(READS[how])
        assert not any(shards.is_divided for shards in pair.shards())
    pair.check()


def _ema(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def _set_data(model: Any, optimizer: Any) -> None:
    model.a.data = model.a.detach() * 0.25
    model.b.data = model.b.data + 1


def _load(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _numpy(model: Any, optimizer: Any) -> None:
    model.b.detach().numpy()[:] = 3.0


def _states(model: Any, optimizer: Any) -> None:
    optimizer.state[model.a]["exp_avg"].zero_()
    optimizer.state[model.d]["exp_avg_sq"].add_(0.5)


def _load_states(model: Any, optimizer: Any) -> None:
    other, made = eager("adamw")
    eager_step(other, made, [batch(50, 0)])
    optimizer.load_state_dict(made.state_dict())


def _no_states(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _one_state(model: Any, optimizer: Any) -> None:
    optimizer.state[model.a]["exp_avg"] = torch.ones(8, 6, dtype=torch.float64)


def _swap(model: Any, optimizer: Any) -> None:
    """As an average of parameters is tried out and taken back."""
    held = [param.data.clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.zero_()
    for param, value in zip(model.parameters(), held, strict=True):
        param.data.copy_(value)


WRITES = [_ema, _set_data, _load, _numpy, _states, _load_states, _no_states, _one_state, _swap]


# Before the first step nothing is under way, whatever the schedule.
@pytest.mark.parametrize(("after", "options"), [(0, {}), (2, {}), (2, ACROSS)], ids=["first", "later", "across"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_the_user_writes_is_taken_over(write: Any, after: int, options: Any) -> None:
    if after == 0 and write in (_states, _one_state):
        after = 1  # there is no state before the first step
    pair = Pair((2, 2), ONE_AXIS, **options)
    for _ in range(after):
        pair.train()
    pair.everyone(write)
    write(pair.model, pair.optimizer)
    pair.train()
    pair.train()
    pair.check()


def test_writing_on_a_rank_changes_its_part_alone() -> None:
    pair = Pair((2, 2), ONE_AXIS, "sgd")
    pair.train()
    with torch.no_grad():
        pair.world.models[3].a.zero_()
    before = pair.world.models[0].a.detach().clone()
    pair.world.models[3].c.sum()
    pair.train()
    parts = [shards.parts()["a"] for shards in pair.shards()]
    assert torch.equal(parts[0], parts[2]) and not torch.equal(parts[1], parts[3])
    assert not torch.equal(before[:4], parts[0])


def test_aliases_that_somebody_keeps_stay_readable() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    model: Any = pair.world.models[0]
    held = model.state_dict()  # without a copy
    first = {name: value.clone() for name, value in held.items()}
    pair.train()
    assert pair.memory()["a"] > 0 and pair.memory(1)["a"] == 0
    assert torch.equal(held["a"], first["a"])  # as it was, until somebody reads the parameter itself
    now = model.a.detach().clone()
    assert torch.equal(held["a"], now) and not torch.equal(now, first["a"])
    del held
    pair.train()
    assert pair.memory()["a"] == 0
    pair.check()


def test_backward_through_old_values_is_refused() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    loss = pair.world.models[0](batch(9, 0).requires_grad_())  # needs the parameters for its gradient
    pair.train()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    pair.check()


def test_state_that_was_replaced_unread_is_gone() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    model: Any = pair.world.models[0]
    optimizer = pair.world.optimizers[0]
    assert optimizer is not None
    old = optimizer.state[model.a]["exp_avg"]
    pair.everyone(_one_state)
    _one_state(pair.model, pair.optimizer)
    pair.train()
    with pytest.raises(CommFuseError, match="state_dict"):
        old.sum()
    pair.check()


def test_state_that_moves_to_another_parameter_is_gathered() -> None:
    """As when a parameter is replaced and the new one is given the old one's state, which nobody has read yet."""
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    moved = []
    for model, optimizer in zip(pair.world.models, pair.world.optimizers, strict=True):
        assert optimizer is not None
        new = nn.Parameter(torch.ones(8, 6, dtype=torch.float64))
        optimizer.state[new] = optimizer.state.pop(model.a)
        moved.append(optimizer.state[new]["exp_avg"])
    pair.world.models[0].b.sum()
    assert pair.optimizer is not None
    for state in moved:
        assert_close({"": state}, {"": pair.optimizer.state[pair.model.a]["exp_avg"]})


def test_other_shapes_and_evaluation_keep_the_parts() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    (shards, *_) = pair.shards()
    parts = {name: part.data_ptr() for name, part in shards.parts().items()}
    for rows in (2, 4, 3):
        pair.train(rows)
    for model in pair.world.models:
        model.eval()
    pair.world([(batch(0, 0),)] * 4)
    for model in pair.world.models:
        model.train()
    pair.train()
    assert shards.is_divided and pair.shards()[0] is shards
    assert {name: part.data_ptr() for name, part in shards.parts().items()} == parts
    pair.check()


def test_other_layouts_make_it_whole_in_between() -> None:
    pair = Pair((2, 2, 2), TWO_AXES)
    pair.train()
    divide(pair.step, {"a": (("pp", S(1)),), "d": (("tp", S(1)),)})
    pair.train(rows=2)
    assert pair.memory()["a"] == 0 and pair.memory()["b"] > 0
    divide(pair.step, {})
    pair.train(rows=3)
    assert all(pair.memory().values())
    pair.train()  # divided in two axes again
    assert pair.memory()["b"] == 0
    pair.train(rows=3)
    pair.check()


def test_two_steps_on_one_model() -> None:
    first, second = Pair((2, 2), ONE_AXIS, "sgd"), Pair((2, 2), ONE_AXIS, "sgd")
    second.world.models = first.world.models
    second.world.optimizers = first.world.optimizers
    second.model, second.optimizer = first.model, first.optimizer
    for pair in (first, second, first, second):
        pair.train()
    first.check()


def test_tracing_sees_shapes_and_gathers_nothing() -> None:
    pair = Pair((2, 2), ONE_AXIS)
    pair.train()
    (shards, *_) = pair.shards()
    plain = cf.compile(Fresh(), device_num=4, mesh=(2, 2), form="step").lower(batch(0, 0)).text()
    with pair.world._shapes_only():
        text = cf.compile(pair.world.models[0], device_num=4, mesh=(2, 2), form="step").lower(batch(0, 0)).text()
    assert text == plain
    assert shards.is_divided
    pair.check()


def Fresh() -> nn.Module:
    return eager("sgd")[0]
