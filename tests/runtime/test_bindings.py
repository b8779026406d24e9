"""The Python functions of PyTorch that generated code calls run the very ops of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.runtime.execute.code.bindings import BINDINGS

aten = torch.ops.aten
M, N = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)
INT = torch.arange(6).reshape(2, 3)
HALF = torch.ones(2, 3, dtype=torch.bfloat16)
B, C = torch.ones(2, 2, 3), torch.ones(2, 3, 2)

CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((M, M), {}), ((M, 2), {}), ((INT, 2.5), {}), ((HALF, M), {"alpha": 2})],
    aten.add.out: [((M, M), {"out": torch.empty(2, 3)}), ((M, M), {"alpha": 2, "out": torch.empty(2, 3)})],
    aten.add_.Tensor: [((M.clone(), M), {}), ((M.clone(), 2.5), {"alpha": 3}), ((HALF.clone(), 1e-3), {})],
    aten.addmm.default: [((torch.ones(4), M, N), {}), ((torch.ones(4), M, N), {"beta": 2, "alpha": 0.5})],
    aten.bmm.default: [((B, C), {})],
    aten.cat.default: [(([M, M],), {}), (([M, HALF], 1), {}), (([M, M], -1), {})],
    aten.clone.default: [((M,), {}), ((M.t(),), {"memory_format": torch.contiguous_format})],
    aten.copy_.default: [((torch.empty(2, 3), HALF), {}), ((torch.empty(2, 3), M, True), {})],
    aten.div.Tensor: [((M, M + 1), {}), ((INT, 2), {}), ((HALF, 3.0), {})],
    aten.exp.default: [((M,), {})],
    aten.expand.default: [((M, [4, 2, 3]), {}), ((torch.ones(1, 3), [-1, 3]), {}), ((torch.ones(()), []), {})],
    aten.mm.default: [((M, N), {})],
    aten.mm.out: [((M, N), {"out": torch.empty(2, 4)})],
    aten.mul.Tensor: [((M, M), {}), ((M, 2), {}), ((INT, 2.5), {}), ((HALF, 0.1), {})],
    aten.mul_.Tensor: [((M.clone(), M), {}), ((HALF.clone(), 0.1), {})],
    aten.neg.default: [((M,), {})],
    aten.permute.default: [((B, [2, 0, 1]), {}), ((M, [-1, 0]), {})],
    aten.relu.default: [((-M,), {})],
    aten.relu_.default: [((-M,), {})],
    aten.rsqrt.default: [((M + 1,), {})],
    aten.select.int: [((B, 1, 0), {}), ((B, -1, -2), {})],
    aten.sigmoid.default: [((M,), {})],
    aten.sub.Tensor: [((M, M), {}), ((M, 2), {}), ((INT, 2.5), {"alpha": 2})],
    aten.sum.IntList_out: [((M, [0], True), {"out": torch.empty(1, 3)}), ((M, [0]), {"out": torch.empty(3)})],
    aten.sum.dim_IntList: [((M, [0]), {}), ((M, [0, 1], True), {}), ((HALF, [1]), {"dtype": torch.float32})],
    aten.t.default: [((M,), {}), ((torch.ones(3),), {})],
    aten.tanh.default: [((M,), {})],
    aten.transpose.int: [((B, 0, -1), {})],
    aten.unsqueeze.default: [((M, 1), {}), ((M, -1), {})],
    aten.view.default: [((M, [3, 2]), {}), ((M, [-1]), {}), ((torch.ones(1), []), {})],
}


class Recorder(TorchDispatchMode):
    """Notes each op with its arguments, tensors by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = [id(each) if isinstance(each, torch.Tensor) else str(each) for each in args]
        self.calls.append((func, plain, sorted(kwargs)))
        return func(*args, **kwargs)


def recorded(function: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, list[Any]]:
    with torch.no_grad(), Recorder() as recorder:
        return function(*args, **kwargs), recorder.calls


def fresh(op: Any, args: Any) -> Any:
    """The arguments, with another tensor in place of one that the op writes."""
    return (args[0].clone(), *args[1:]) if op._schema.name.endswith("_") else args


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_runs_the_same_overload(op: Any) -> None:
    for args, kwargs in CALLS[op]:
        own, bound = fresh(op, args), fresh(op, args)
        want, ops = recorded(op._op, own, kwargs)
        stride, want = want.stride(), want.clone()  # the second call may write to the same `out`
        got, calls = recorded(BINDINGS[op], bound, kwargs)
        assert [call[0] for call in calls] == [op] == [call[0] for call in ops]
        assert [call[1][1:] for call in calls] == [call[1][1:] for call in ops] and calls[0][2] == ops[0][2]
        assert got.dtype == want.dtype and got.stride() == stride and torch.equal(got, want)


FUSED: dict[Any, tuple[int, list[str], dict[str, Any]]] = {
    aten._fused_adagrad_.default: (1, ["lr_decay", "weight_decay", "eps"], {"maximize": False}),
    aten._fused_adam_.default: (2, ["beta1", "beta2", "weight_decay", "eps"], {"amsgrad": False, "maximize": False}),
    aten._fused_adamw_.default: (2, ["beta1", "beta2", "weight_decay", "eps"], {"amsgrad": False, "maximize": True}),
    aten._fused_sgd_.default: (
        1,
        ["weight_decay", "momentum", "dampening"],
        {"nesterov": True, "maximize": False, "is_first_step": False},
    ),
}
"""Fused updates: how many states they take, their numbers but for the learning rate, and their flags."""


@pytest.mark.parametrize("op", FUSED, ids=str)
@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_fused_updates_take_the_rate_as_a_number_and_as_a_tensor(op: Any, rate: Any) -> None:
    states, numbers, flags = FUSED[op]
    settings = {"lr": rate, **dict.fromkeys(numbers, 0.125), **flags}

    def update(function: Any) -> tuple[list[torch.Tensor], list[Any]]:
        lists = [[M.clone()], [M + 1], *([M.clone()] for _ in range(states))]
        maxima = [[]] if "amsgrad" in flags else []
        steps = [] if op is aten._fused_sgd_.default else [[torch.tensor(3.0)]]
        with torch.no_grad(), Recorder() as recorder:
            function(*lists, *maxima, *steps, **settings)
        return [each for (each,) in lists], recorder.calls

    overload = op if isinstance(rate, float) else op.overloadpacket.tensor_lr
    want, ops = update(overload._op)
    got, calls = update(BINDINGS[op])
    assert [call[0] for call in calls] == [overload] == [call[0] for call in ops]
    assert all(map(torch.equal, got, want))
    assert {*BINDINGS} == {*CALLS, *FUSED}
