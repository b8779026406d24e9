"""Ops are recorded as torch records them, and have the results that torch's rules for fake tensors give them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from commfuse_fx.capture.trace.empty_tensors import FakeTensors
from commfuse_fx.capture.trace.known_results import key_of, known_result
from commfuse_fx.capture.trace.quick_recording import quick_recording

aten = torch.ops.aten


def views(x: torch.Tensor) -> torch.Tensor:
    return (x.t()[1:, ::2].unsqueeze(0).expand(3, -1, -1).reshape(-1) * 2).sum()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0].mul_(2.0)
    y.t_()
    other = y.detach()
    other.unsqueeze_(0)
    return (other + y).add_(1)


def lists(x: torch.Tensor) -> Any:
    first, second = x.split(2)
    values, indices = torch.stack([first, second]).max(dim=0)
    parts = aten.native_group_norm_backward(x, x, x[:, :1], x[:, :1], None, 4, 1, 5, 1, [False, True, False])
    return torch.cat((values, indices.to(x.dtype)), 1), torch.var_mean(x, dim=0), parts[1]


def constants(x: torch.Tensor) -> torch.Tensor:
    known = torch.tensor([1.0, 2.0])
    return x * known.sum() + torch.full((), float("nan")) + torch.arange(5, dtype=x.dtype)


def gradients(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = torch.nn.functional.layer_norm(x @ x.t(), (4,)).sigmoid()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def recorded(function: Callable[..., Any], mode: FakeTensorMode, quickly: bool) -> fx.Graph:
    with mode, quick_recording() if quickly else nullcontext():
        return make_fx(function)(torch.empty(4, 5)).graph


def description(graph: fx.Graph) -> list[Any]:
    def layout(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return [layout(each) for each in value] if isinstance(value, (tuple, list)) else value
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device

    return [(str(node.format_node()), layout(node.meta.get("val"))) for node in graph.nodes]


@pytest.mark.parametrize("function", [views, in_place, lists, constants, gradients])
def test_the_graph_is_that_of_torch(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = description(recorded(function, FakeTensorMode(), quickly=False))
    by_torch: list[Any] = []
    original = proxy_tensor.proxy_call
    monkeypatch.setattr(
        "commfuse_fx.capture.trace.quick_recording._original",
        lambda *args: (by_torch.append(args[1]), original(*args))[1],
    )
    for _ in range(2):  # the second time the results of the ops are known
        assert description(recorded(function, FakeTensors(), quickly=True)) == right
    assert len(by_torch) < len(right)


def test_another_version_of_torch_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("commfuse_fx.capture.trace.quick_recording._original", other)
    before = proxy_tensor.proxy_call
    with quick_recording():
        assert proxy_tensor.proxy_call is before


def test_a_known_view_shares_the_memory_of_its_base() -> None:
    for _ in range(2):
        with FakeTensors():
            x = torch.empty(4, 6)
            y = x.transpose(0, 1)[2:]
            assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (y.shape, y.stride(), y.storage_offset()) == ((4, 4), (1, 6), 2)
            assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata


@pytest.mark.parametrize(
    "first, second",
    [
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((torch.empty(2, 3),), (torch.empty(3, 2).t(),)),
        ((torch.empty(4)[:2],), (torch.empty(4)[2:],)),
        ((torch.empty(2),), (torch.empty(2, dtype=torch.float64),)),
        ((torch.empty(4)[:2],), (torch.empty(2),)),
        (([1, 2], 3), ([1], 2, 3)),
    ],
)
def test_arguments_that_differ_have_other_results(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    mode = FakeTensors()
    keys = []
    for args in (first, second):
        args = tuple(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args)
        keys.append(key_of(mode, aten.mul.Tensor, args, {}))
    assert keys[0] != keys[1] and None not in keys


def test_what_follows_from_more_than_layouts_is_not_known() -> None:
    mode = FakeTensors()
    x = mode.from_tensor(torch.empty(2, 2))
    assert key_of(mode, aten.nonzero.default, (x,), {}) is None  # values
    assert key_of(mode, aten.add_.Tensor, (x, 1), {}) is None  # a change
    assert key_of(mode, aten.add.Tensor, (x, float("nan")), {}) is None
    assert key_of(mode, aten.add.Tensor, (x, torch.empty(2)), {}) is None
    assert key_of(FakeTensors(), aten.neg.default, (x,), {}) is None  # another mode's tensor
    key = key_of(mode, aten.as_strided.default, (x, [2, 2], [2, 1]), {})
    with mode:
        torch.as_strided(x, (2, 2), (2, 1))
    assert key is not None and known_result(mode, key, (x, [2, 2], [2, 1])) is not None
    # Whether a view stays inside of the memory of its base is for torch to say.
    smaller = mode.from_tensor(torch.empty(2, 1)).expand(2, 2)
    assert key != key_of(mode, aten.as_strided.default, (smaller, [2, 2], [2, 1]), {})


def test_a_known_result_has_as_much_memory_as_that_of_torch() -> None:
    sizes = []
    for _ in range(2):
        with FakeTensors():
            wide = torch.empty(4, 12)[:, ::2]  # its memory goes beyond its last element
            sizes.append(aten._new_zeros_with_same_feature_meta(torch.empty(4, 6), wide).untyped_storage().nbytes())
    assert sizes == [4 * 12 * 4] * 2


def test_flags_that_choose_layouts_of_convolutions_are_part_of_the_key() -> None:
    mode = FakeTensors()
    x = mode.from_tensor(torch.empty(2, 2))
    keys = [key_of(mode, aten.neg.default, (x,), {})]
    with torch.backends.mkldnn.flags(enabled=False):
        keys.append(key_of(mode, aten.neg.default, (x,), {}))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(key_of(mode, aten.neg.default, (x,), {}))
    finally:
        torch.set_num_threads(threads)
    assert None not in keys and len({*keys}) == 3
