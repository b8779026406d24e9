"""A forward that replaces parameters and buffers: by `.data`, by assignment, under another name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import commfuse_fx as cf

THIS = __file__.rpartition("/")[2]


class Replaces(nn.Module):
    def __init__(self, change: Callable[[Replaces], object], late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("empty", None)
        self._change, self._late = change, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._late:
            self._change(self)
        loss = (self.layer(x) + self.get_buffer("a") - self.get_buffer("b") * 0.5).square().mean()
        loss = loss + self.other(x).mean()
        if self._late:
            self._change(self)
        return loss + self.layer.weight.sum() * 0.1


def of_weight(model: Replaces) -> None:
    model.layer.weight.data = model.layer.weight.data * 0.5


def of_all(model: Replaces) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())


def transposed(model: Replaces) -> None:
    model.layer.weight.data = model.layer.weight.data.t()


def of_buffer(model: Replaces) -> None:
    model.get_buffer("a").data = model.get_buffer("a").data * 2 + 1


def swapped(model: Replaces) -> None:
    model.a, model.b = model.get_buffer("b"), model.get_buffer("a")


def rotated(model: Replaces) -> None:
    model.a, model.b = model.get_buffer("b")[:], model.get_buffer("a") * 2


def put_back(model: Replaces) -> None:
    weight = model.layer.weight
    del model.layer.weight
    model.layer.weight = weight


def to_what_it_is(model: Replaces) -> None:
    model.layer = model.layer.to(torch.float32)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "change", [of_weight, of_all, transposed, of_buffer, swapped, rotated, put_back, to_what_it_is]
)
def test_as_in_eager_execution(change: Callable[[Replaces], object], late: bool) -> None:
    model = Replaces(change, late)
    reference = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    step = cf.compile(model, optimizer=mine, parallel_mode="stand_alone")
    x = torch.randn(4, 4)
    for _ in range(2):
        theirs.zero_grad()
        want = reference(x)
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(x), want.detach())
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def replaced(model: Replaces) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.detach() * 0.9)


def assigned(model: Replaces) -> None:
    model.other.load_state_dict(model.layer.state_dict(), assign=True)


def made(model: Replaces) -> None:
    model.layer.scale = nn.Parameter(torch.ones(4))


def removed(model: Replaces) -> None:
    model.other.bias = None


def made_buffer(model: Replaces) -> None:
    model.layer.register_buffer("cache", torch.ones(4))


def made_module(model: Replaces) -> None:
    model.more = nn.Linear(4, 4)


def removed_buffer(model: Replaces) -> None:
    model.b = None


def of_other_shape(model: Replaces) -> None:
    model.layer.weight.data = torch.zeros(8, 4)


def of_other_dtype(model: Replaces) -> None:
    model.layer.to(torch.float64)


def shared(model: Replaces) -> None:
    model.layer.weight.data = model.other.weight.data


def other_memory(model: Replaces) -> None:
    model.layer.weight.detach_().set_(model.other.weight.detach() * 2)


def of_a_result(model: Replaces) -> None:
    result = model.layer.weight * 2
    result.data = result.data + 1


REFUSED: dict[Callable[[Replaces], None], str] = {
    replaced: r"cannot trace layer at .*{line}: the model replaces its parameter layer.weight .*copy_",
    assigned: r"cannot trace other at .*{line}: the model replaces its parameter other.weight",
    made: r"cannot trace layer at .*{line}: the model makes its parameter layer.scale .*run it once",
    removed: r"cannot trace other: the model removes its parameter other.bias",
    made_buffer: r"cannot trace layer at .*{line}: the model makes its buffer layer.cache .*register_buffer",
    made_module: r"cannot trace more at .*: the model makes its parameter more.weight",
    removed_buffer: r"cannot trace the top-level module at .*{line}: the model removes its buffer b",
    of_other_shape: r"cannot trace .* at .*{line}: the model sets .data of layer.weight .*\[4, 4\].*\[8, 4\]",
    of_other_dtype: r"cannot trace .* at .*{line}: the model sets .data of layer.weight .*float32.*float64",
    shared: r"cannot trace .* at .*{line}: the model sets .data of layer.weight to the memory of other.weight",
    other_memory: r"cannot trace .* at .*{line}: the model gives a parameter or buffer other memory .*copy_",
    of_a_result: r"cannot trace .* at .*{line}: the model sets .data of a tensor that is neither",
}


@pytest.mark.parametrize(("change", "message"), REFUSED.items(), ids=[each.__name__ for each in REFUSED])
def test_what_cannot_be_a_write_is_refused(change: Callable[[Replaces], None], message: str) -> None:
    model = Replaces(change, late=change in (removed, removed_buffer))
    before = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, optimizer=optimizer, parallel_mode="stand_alone")
    lines = range(change.__code__.co_firstlineno + 1, change.__code__.co_firstlineno + 4)
    line = f"{THIS}:({'|'.join(map(str, lines))})"
    with pytest.raises(cf.CaptureError, match=message.replace("{line}", line)):
        step(torch.randn(4, 4))
    after = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert list(after.items()) == list(before.items()), "the model is as it was"


def test_an_empty_buffer_that_is_filled_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def fill(model: Replaces) -> None:
        if model.empty is None:
            model.empty = torch.ones(4)

    model = Replaces(fill)
    step = cf.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), parallel_mode="stand_alone")
    with caplog.at_level(logging.WARNING, "commfuse_fx"):
        step(torch.randn(4, 4))
    assert "empty buffer empty" in caplog.text and model.empty is None
