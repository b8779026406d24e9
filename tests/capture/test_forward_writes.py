"""Attributes that a forward sets are set by every call, whether it is traced or runs a cached graph."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.property.attribute_parts import WAYS, SetsAttributes, attributes_of


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


class Model(SetsAttributes):
    """Its forward sets attributes in one way."""

    def __init__(self, way: str) -> None:
        super().__init__(random.Random(0), 4)
        self.lin, self.way, self.helper = nn.Linear(4, 4), way, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ALL_WAYS[self.way](self, self.lin(x))

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        del self.forward
        return self(x) * 2


def _partial(net: Any, y: torch.Tensor) -> torch.Tensor:
    net.helper = functools.partial(torch.mul, other=2.0)
    result: torch.Tensor = net.helper(y)
    return result


def _past_setattr(net: Any, y: torch.Tensor) -> torch.Tensor:
    net.__dict__["seen"] = "x"
    vars(net.lin).update(note=f"{len(y)} rows")
    return y


def _number(net: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "is_set_up"):
        net.is_set_up, net.lin.size = 1, tuple(y.shape)
        y = y + 5
    return y * (1 + len(getattr(net.lin, "size", ())))


def _default(net: Any, y: torch.Tensor) -> torch.Tensor:
    factor = getattr(net.drop, "factor", 6)
    net.drop.factor = 1
    return y * factor


def _new_item(net: Any, y: torch.Tensor) -> torch.Tensor:
    factor = net.config.table.get("factor", 6)
    net.config.table["factor"] = 2
    return y * factor


def _of_tensors(net: Any, y: torch.Tensor) -> torch.Tensor:
    factor = getattr(net.lin.weight, "factor", 6)
    net.lin.weight.factor = net.lin.bias.of = 2
    return y * factor


def _kept(net: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "width"):
        net.width = y.shape[-1]
    return y * net.width


ALL_WAYS = {
    **WAYS,
    "partial": _partial,
    "past __setattr__": _past_setattr,
    "numbers that were absent": _number,
    "a number in place of a default": _default,
    "a new item": _new_item,
    "attributes of parameters": _of_tensors,
    "a kept result": _kept,
    "nothing": lambda net, y: y,
}


def _state(net: Any) -> dict[str, Any]:
    others = {"helper": str(net.helper), "seen": vars(net).get("seen"), "note": getattr(net.lin, "note", None)}
    return {**attributes_of(net), **others, **vars(net.lin.weight)}


def _calls(net: nn.Module, form: str) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    if form == "module":
        compiled = cf.compile(net)
        return compiled, lambda x: compiled(x).sum()
    step = cf.compile(net, loss_fn=lambda out, _: out.sum())
    return step, lambda x: step(x, x)


@pytest.mark.parametrize("form", ["module", "step", "evaluation"])
@pytest.mark.parametrize("way", ALL_WAYS)
def test_state_and_values_are_those_of_eager_torch(way: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also after the user has set attributes back, and for shapes that take turns."""
    net = Model(way)
    other = copy.deepcopy(net)
    _, call = _calls(net, form)
    for number, rows in enumerate([4, 4, 5, 4, 5, 5, 4, 4]):
        for each in (net, other):
            each.train(form != "evaluation")
            each.spare = 1
            if number == 5:
                each.config.problem = each.first = None
            if number == 6:
                each.rows = -1
                each.drop.note = each.lin.note = "of the user"
        x = torch.randn(rows, 4)
        torch.testing.assert_close(call(x).detach(), other(x).sum().detach())
        assert _state(net) == _state(other), number
    assert not [each for each in caplog.records if each.levelno == logging.WARNING and "in forward" in each.message]


def _patched_by_method(net: Any) -> None:
    net.forward = types.MethodType(Model.doubled, net)


def _patched_by_closure(net: Any) -> None:
    original = net.forward

    def redirected(x: torch.Tensor) -> torch.Tensor:
        net.forward = original
        result: torch.Tensor = original(x) * 2
        return result

    net.forward = redirected


def _patched_part(net: Any) -> None:
    def once(x: torch.Tensor) -> torch.Tensor:
        del net.lin.forward
        return nn.Linear.forward(net.lin, x) * 2

    net.lin.forward = once


def _patched_by_partial(net: Any) -> None:
    net.forward = functools.partial(Model.doubled, net)


@pytest.mark.parametrize("form", ["module", "step"])
@pytest.mark.parametrize("patch", [_patched_by_method, _patched_by_closure, _patched_part, _patched_by_partial])
def test_a_patch_that_takes_itself_back_serves_one_call(patch: Callable[[Any], None], form: str) -> None:
    """The graph of the patched forward serves the next patch, though that is another function."""
    net = Model("nothing")
    other = copy.deepcopy(net)
    compiled, call = _calls(net, form)
    x = torch.randn(3, 4)
    for is_patched in (False, True, True, False, False, True, False):
        if is_patched:
            patch(net)
        want = other(x).sum().detach() * (2 if is_patched else 1)
        torch.testing.assert_close(call(x).detach(), want)
    with torch.no_grad():
        torch.testing.assert_close(net(x), other(x))
    assert len(compiled.planner.plans if form == "step" else compiled._compiled.planner.plans) <= 3


def test_reading_a_graph_sets_nothing() -> None:
    net = Model("absent")
    step = cf.compile(net, loss_fn=F.mse_loss)
    x = torch.randn(3, 4)
    assert "aten" in step.lower(x, x).text() and not hasattr(net, "is_ready")
    step(x, x)
    assert net.is_ready


def _summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("form", ["module", "step"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_sets_the_attributes_of_its_own_model(copied: Callable[[Any], Any], form: str) -> None:
    compiled = cf.compile(Model("phase"), **({} if form == "module" else {"loss_fn": _summed}))
    x = torch.randn(3, 4)
    batch = (x,) if form == "module" else (x, x)
    compiled(*batch)
    other = copied(compiled)
    for _ in range(2):
        other(*batch)
    models = [each.module if form == "module" else each.model for each in (compiled, other)]
    assert [each.phase for each in models] == ["run", "warm"]


def _refused_there(y: torch.Tensor) -> torch.Tensor:
    return y * 2 if y.sum() > 0 else y


def _refused_later(y: torch.Tensor) -> torch.Tensor:
    return y + SCALE.mul_(1)


SCALE = torch.ones(4)


class Refused(nn.Module):
    """A model that cannot be traced, and keeps what it computes once."""

    def __init__(self, refused: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.refused, self.mask, self.is_ready, self.table = nn.Linear(4, 4), refused, None, False, {"a": 0}
        self.config = types.SimpleNamespace(mask=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.mask, self.is_ready, self.table["a"] = torch.ones(4) * 3, True, 1
        if self.refused is _refused_there:
            self.config.mask = torch.ones(4)
        return self.refused(self.lin(x) * self.mask)

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        del self.forward
        return self(x) * 2


@pytest.mark.parametrize("form", ["module", "step"])
@pytest.mark.parametrize("refused", [_refused_there, _refused_later])
def test_a_refusal_leaves_attributes_as_they_were(refused: Callable[[torch.Tensor], torch.Tensor], form: str) -> None:
    """So the model still computes in eager PyTorch. A patch that serves one call is gone, as after any error."""
    net = Refused(refused)
    x = torch.randn(3, 4)
    want = copy.deepcopy(net)(x)
    for patched in (False, True):
        if patched:
            net.forward = types.MethodType(Refused.doubled, net)
        with pytest.raises(cf.CaptureError):
            _calls(net, form)[1](x)
        assert (net.mask, net.is_ready, net.table, net.config.mask) == (None, False, {"a": 0}, None)
        assert "forward" not in vars(net)
    torch.testing.assert_close(net(x), want)


class Growing(nn.Module):
    """What its forward leaves is made of what it has found."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls, self.text = nn.Linear(4, 4), 0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.text += "x"
        self.late = getattr(self, "late", 0) + 1
        y: torch.Tensor = self.lin(x)
        return y


def test_what_counts_is_not_traced_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    net = Growing()
    step = cf.compile(net, loss_fn=F.mse_loss)
    x = torch.randn(3, 4)
    for _ in range(12):
        step(x, x)
    warned = [each.message for each in caplog.records if "does only when it is traced" in each.message]
    assert sorted(each.split()[3] for each in warned) == ["Growing.calls", "Growing.late", "Growing.text"], warned
    assert len(step.planner.plans) <= 6


def test_a_tensor_in_an_attribute_of_a_parameter_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Storing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.seen = x.mean()
            return F.linear(x, self.weight, self.bias)

    net = Storing(4, 4)
    cf.compile(net)(torch.randn(3, 4))
    assert "stores a tensor in its attribute weight.seen during forward" in caplog.text and not vars(net.weight)


def test_ranks_in_one_process_go_on_from_what_the_forward_has_set() -> None:
    net = Model("phase")
    other = copy.deepcopy(net)
    world = LockstepWorld(cf.compile(net, loss_fn=lambda out, _: out.sum(), device_num=2, form="step"))
    x = torch.randn(4, 4)
    for number in range(8):
        if number == 5:
            _patched_by_method(net)
            _patched_by_method(other)
        want = other(x).sum().detach()
        for result in world([(x, x)] * 2):
            torch.testing.assert_close(result.loss.detach(), want)
        assert _state(net) == _state(other), number
    check = cf.lockstep(world.step.lower(x, x))
    assert torch.equal(check(x, x).loss, check(x, x).loss) and _state(net) == _state(other)


class Boxed(nn.Module):
    """Leaves tensors of the forward in a plain object: where there was none, in place of a number, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.box: Any = types.SimpleNamespace(scale=2.0, inner=Plain())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.line(x) * 2.0
        self.box.inner.hidden, self.box.inner.last, self.box.inner.both = found, found.sum(), [found, x]
        return found


class Plain:
    last = 0.0


def test_tensors_in_plain_objects_are_taken_back_and_told(caplog: pytest.LogCaptureFixture) -> None:
    net = Boxed()
    cf.compile(net)(torch.randn(2, 4)).sum().backward()
    assert vars(net.box.inner) == {} and net.box.inner.last == 0.0
    for name in ("hidden", "last", "both"):
        assert f"stores a tensor in its attribute Boxed.box['inner'].{name} during forward" in caplog.text
    net(torch.randn(2, 4))
    assert net.box.inner.hidden.shape == (2, 4)


def test_functions_that_call_themselves_may_be_attributes() -> None:
    def doubled(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return doubled(x * 2.0, times - 1) if times else x

    def even(x: torch.Tensor, times: int = 3) -> torch.Tensor:
        return odd(x + 1.0, times - 1) if times else x

    def odd(x: torch.Tensor, times: int) -> torch.Tensor:
        return even(x - 2.0, times - 1) if times else -x

    class Recursive(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.act, self.acts = doubled, [even]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.acts[0](self.act(super().forward(x)))
            self.act, self.acts[0] = (even, doubled) if self.act is doubled else (doubled, even)
            return found

    net = Recursive()
    twin = copy.deepcopy(net)
    module, x = cf.compile(net), torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(module(x), twin(x))
    assert net.act is twin.act and net.acts == twin.acts
