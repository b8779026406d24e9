"""A forward that writes to parameters: each rank's part is written, as one device writes the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from tests.oracle import tensors_of
from tests.sharding.writing_models import WRITES, Writes, average, clip, copies

Marks = dict[str, tuple[Any, ...]]

BY_ROWS: Marks = {"up.weight": ("dp", None), "turned": (None, "dp"), "teacher.weight": (None, "dp")}
BY_COLUMNS: Marks = {"up.weight": (None, "dp"), "down.weight": ("dp", None), "turned": ("dp", None), "u": ("dp",)}
TWO_AXES: Marks = {"up.weight": ("tp", "dp"), "down.weight": (None, "tp"), "teacher.weight": (("dp", "tp"), None)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def opaque(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def train(
    model: nn.Module,
    marks: Marks,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None,
    mesh: tuple[int, ...] = (2,),
    **options: Any,
) -> cf.Lockstep:
    """Three steps, the second one in eval mode, of all ranks and of one device."""
    reference = copy.deepcopy(model)
    for name, strategy in marks.items():
        cf.shard(model.get_parameter(name), strategy)
    size = torch.Size(mesh).numel()
    settings: dict[str, Any] = {"parallel_mode": "semi_auto", "full_batch": True, "mesh": mesh, **options}
    step = cf.compile(
        model, optimizer=optimizer(model) if optimizer else None, device_num=size, **settings, form="step"
    )
    mine = optimizer(reference) if optimizer else None
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    found = cf.lockstep(step.lower(batches[0]))
    for number, batch in enumerate(batches):
        for each in (model, reference, *found.models):
            each.train(number != 1)
        want = reference(batch)
        if number != 1:
            reference.zero_grad()
            want.backward()
            if mine is not None:
                mine.step()
        result = found(batch)
        assert result.disagreement is None
        torch.testing.assert_close(result.loss, want.detach(), rtol=1e-9, atol=1e-10)
        tensors = {name: tensor.detach() for name, tensor in tensors_of(reference).items()}
        torch.testing.assert_close({**result.parameters(), **result.buffers()}, tensors, rtol=1e-9, atol=1e-10)
        for rank in found.models:
            torch.testing.assert_close(tensors_of(rank), tensors_of(reference), rtol=1e-9, atol=1e-10)
    return found


@pytest.mark.parametrize("marks", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_parts_are_written(write: Callable[[Writes], object], marks: Marks) -> None:
    train(Writes(write), marks, sgd)


@pytest.mark.parametrize("write", [clip, average, copies])
def test_two_axes_and_parts_of_the_batch(write: Callable[[Writes], object]) -> None:
    train(Writes(write, after=True), TWO_AXES, sgd, mesh=(2, 2))


@pytest.mark.parametrize("optimizer", [None, opaque], ids=["none", "opaque"])
@pytest.mark.parametrize("write", [clip, copies])
def test_parameters_that_ranks_keep_whole(write: Callable[[Writes], object], optimizer: Any) -> None:
    train(Writes(write), BY_ROWS, optimizer)


class Copied(nn.Module):
    """Nothing reads the copy, so nothing else decides how it is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 8).double()
        self.copy = copy.deepcopy(self.layer).requires_grad_(False)
        self.tied = nn.Linear(4, 8).double()
        self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.copy.load_state_dict(self.layer.state_dict())
        with torch.no_grad():
            self.tied.weight.mul_(0.9)
        return self.layer(x).square().mean() + self.tied(x).mean()


def test_a_copy_that_nothing_reads_and_a_tied_parameter() -> None:
    found = train(Copied(), {"layer.weight": ("dp", None)}, sgd)
    program = found.lowered._program
    assert program.params["copy.weight"].layout == program.params["layer.weight"].layout != ()


def test_the_statistics_of_batch_norm() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    found = train(Mean(layers), {"layers.0.weight": ("dp", None)}, sgd)
    assert int(found.models[1].get_buffer("layers.1.num_batches_tracked")) == 2


class Mean(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).square().mean()
        return out


def test_a_write_whose_collective_is_left_out_is_noticed() -> None:
    """The norm of a row of which every rank has a part."""
    model = Writes(WRITES["norms"])
    cf.shard(model.up.weight, (None, "dp"))
    x = torch.randn(8, 4).double()
    step = cf.compile(
        model, {"openstate": False}, optimizer=sgd(model), parallel_mode="semi_auto", mesh=(2,), device_num=2,
        full_batch=True,
    )  # fmt: skip
    lowered = step.lower(x)
    right = cf.lockstep(lowered)(x)
    inside = [info(node).name for node in lowered.program.collectives() if "norm" in info(node).name]
    assert inside
    for name in inside:
        found = cf.lockstep(lowered, drop=[name])(x)
        assert found.disagreement is not None
        assert not torch.allclose(found.parameters()["up.weight"], right.parameters()["up.weight"])
