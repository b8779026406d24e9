"""cf.lockstep says nothing of a divided step that is right, and notices each collective that is left out of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import commfuse_fx as cf
from commfuse_fx.virtual.rank_copies import copy_for_rank
from tests.sharding.calls import Case, Tensor
from tests.sharding.test_rules_basic import CASES

OFF = {"openstate": False}
TOGETHER = 16
"""So many operations share one step: tracing and compiling is what takes the time."""


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True)
class _Named:
    """Stands for a tensor of the module in the arguments of a call."""

    name: str


class Operation(nn.Module):
    """One call of the tests of rules, with its floating-point tensors as parameters, which train where they can."""

    def __init__(self, case: Case, shift: int) -> None:
        super().__init__()
        self.case = case
        self.count = 0
        self.arguments = self._taken(list(case.args)), self._taken(case.kwargs)
        try:
            self._result().sum().backward()
        except (RuntimeError, ValueError):  # the op has no gradient: it is one of the backward
            self.requires_grad_(False)
        self.zero_grad()
        for number, param in enumerate(self.parameters()):
            dims: list[int | None] = [d for d, size in enumerate(param.shape) if size and size % 2 == 0]
            dim = [*dims, None][(shift + number) % (len(dims) + 1)]
            if dim is not None:
                cf.shard(param, tuple("dp" if d == dim else None for d in range(param.ndim)))

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"tensor{self.count}"
            self.count += 1
            if _is_real(value):
                self.register_parameter(name, nn.Parameter(value.clone()))
            else:
                self.register_buffer(name, value)
            return _Named(name)
        if isinstance(value, (list, tuple)):
            return [self._taken(item) for item in value]
        return {k: self._taken(item) for k, item in value.items()} if isinstance(value, dict) else value

    def _given(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._given(item) for item in value]
        if isinstance(value, dict):
            return {key: self._given(item) for key, item in value.items()}
        return getattr(self, value.name) if isinstance(value, _Named) else value

    def _result(self) -> Tensor:
        args, kwargs = self._given(self.arguments[0]), self._given(self.arguments[1])
        found = self.case.target(*args, **kwargs)
        total = torch.zeros((), dtype=torch.float64)
        for number, value in enumerate(found if isinstance(found, (list, tuple)) else [found]):
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if "empty" in str(self.case.target):
                value = torch.zeros_like(value)  # what it holds means nothing
            if value.is_complex():
                value = torch.view_as_real(value.resolve_conj())
            weights = torch.linspace(0.1, 1.3 + number, value.numel(), dtype=torch.float64).view(value.shape)
            total = total + (value.double() * weights).sum() + value.double().square().mean()
        return total

    def forward(self) -> Tensor:
        return self._result()


class Operations(nn.Module):
    def __init__(self, cases: Sequence[Case], shift: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.each = nn.ModuleList([Operation(case, shift + number) for number, case in enumerate(cases)])

    def forward(self, x: Tensor) -> Tensor:
        results = [self.scale * one().tanh() for one in self.each]
        return torch.stack(results).sum() + (self.scale * x).sum()


def _kinds(case: Case) -> list[str]:
    """What the tensors in a call's lists are: a mask picks a number of rows that its values decide."""
    listed = [item for value in case.args if isinstance(value, list) for item in value]
    return ["mask" if isinstance(item, Tensor) and item.dtype == torch.bool else "" for item in listed]


def check(model: nn.Module, *batch: Tensor, mesh: tuple[int, ...] = (2,), tolerance: float = 1e-9) -> cf.Lockstep:
    """The ranks agree with one another, and with one device."""
    reference, _ = copy_for_rank(model, None)
    torch.manual_seed(1)
    want = reference(*batch)
    want.backward()
    size = torch.Size(mesh).numel()
    step = cf.compile(model, OFF, parallel_mode="semi_auto", mesh=mesh, device_num=size, full_batch=True, form="step")
    found = cf.lockstep(step.lower(*batch))
    result = found(*batch)
    assert result.disagreement is None and result.compared > 10
    torch.testing.assert_close(result.loss, want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    for name, param in reference.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(result.grads[name], param.grad, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found


TRACEABLE = [case for case in CASES if case.target is not torch.ops.aten.index.Tensor or "mask" not in _kinds(case)]


@pytest.mark.parametrize("first", range(0, len(TRACEABLE), TOGETHER))
def test_operations(first: int) -> None:
    cases = TRACEABLE[first : first + TOGETHER]
    tolerance = 1e-9 if all(_is_wide(case) for case in cases) else 1e-5
    check(Operations(cases, first // TOGETHER), torch.arange(4.0).double(), tolerance=tolerance)


def _is_wide(case: Case) -> bool:
    return all(value.dtype != torch.float32 for value in case.args if isinstance(value, Tensor))


class Layer(nn.Module):
    """A layer whose weight is divided, and what a test does with its result."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)
        self._after = after

    def forward(self, x: Tensor) -> Tensor:
        return self._after(self.layer(x), self.weight).square().mean()


def routed(y: Tensor, weight: Tensor) -> Tensor:
    """A mixture of four experts: the two best ones of each row, put into a table by `scatter`."""
    best, chosen = y[:, :4].softmax(-1).topk(2, -1)
    gates = torch.zeros(8, 4, dtype=y.dtype).scatter(1, chosen, best)
    experts = torch.stack([(y @ part.t()).tanh() for part in weight.chunk(4)], 1)
    return (gates.unsqueeze(-1) * experts).sum(1)


def dispatched(y: Tensor, weight: Tensor) -> Tensor:
    """The same with one expert per row, which takes its rows from a buffer of its own."""
    best, chosen = y[:, :4].softmax(-1).topk(1, -1)
    place = (F.one_hot(chosen[:, 0], 4).cumsum(0) - 1).gather(1, chosen)[:, 0]
    buffers = torch.zeros(4, 8, 16, dtype=y.dtype).index_put((chosen[:, 0], place), y)
    return (buffers @ weight)[chosen[:, 0], place] * best


def with_rows(y: Tensor, weight: Tensor) -> Tensor:
    y = y.clone()
    y[0] = 1.0
    y[2:4, 1::2] = weight[:2, :8]
    return y


def from_rows(y: Tensor, weight: Tensor) -> Tensor:
    made = y.new_empty(8, 16)
    made[:4] = y[:4]
    made[4:] = y[4:] @ weight
    return made


def flags(y: Tensor, weight: Tensor) -> Tensor:
    return y * torch.empty(8, 16, dtype=torch.bool).copy_(y > 0)


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalize": lambda y, _: F.normalize(y),
    "norm": lambda y, _: torch.stack([y.norm(dim=1), y.norm(p=1, dim=1), y.norm(p=3, dim=1), y.norm().expand(8)]),
    "norm-inf": lambda y, _: y.norm(p=float("inf"), dim=1) + y.norm(p=float("-inf"), dim=1),
    "extremes": lambda y, _: torch.stack([y.max(), y.min(), *y.aminmax(dim=0).max]),
    "one-hot": lambda y, _: y * F.one_hot(y.argmax(1), 16),
    "rows": with_rows,
    "quantile": lambda y, _: y.quantile(torch.tensor([0.3, 0.9], dtype=y.dtype), dim=1),
    "circular": lambda y, _: F.pad(y.view(2, 1, 8, 8), (1, 2, 3, 1), mode="circular"),
    "routed": routed,
    "dispatched": dispatched,
    "scans": lambda y, _: y.cumsum(1) + y.cumprod(0) + y.logcumsumexp(1),
    "order": lambda y, _: y.sort(1).values + y.roll(3, 1) + y.roll(5) + y.gather(1, y.argsort(1)),
    "index-put": lambda y, w: y.index_put((torch.tensor([1, 3]), torch.tensor([0, 2])), w[0, :2], accumulate=True),
    "copied": lambda y, w: y.new_empty(8, 16).copy_(y) + torch.empty_like(y).copy_(y @ w),
    "strided": lambda y, _: y.new_empty_strided((8, 16), (1, 8)).copy_(y) + torch.empty(8, 16, dtype=y.dtype).fill_(1),
    "from-rows": from_rows,
    "flags": flags,
    "variance": lambda y, _: y / (y.std(1, keepdim=True) + 1) + torch.var_mean(y, 0)[0],
}

LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "spectral": parametrizations.spectral_norm,
    "spectral-old": torch.nn.utils.spectral_norm,
    "weight": parametrizations.weight_norm,
    "weight-old": torch.nn.utils.weight_norm,
}


def marked(model: nn.Module, dim: int) -> nn.Module:
    for param in model.parameters():
        if param.ndim == 2 and param.shape[dim] % 2 == 0:
            cf.shard(param, ("dp", None) if dim == 0 else (None, "dp"))
    return model


@pytest.mark.parametrize(("number", "name"), list(enumerate(AFTER)), ids=AFTER.keys())
def test_functions(number: int, name: str) -> None:
    torch.manual_seed(0)
    model = marked(Layer(AFTER[name]).double(), dim=number % 2)
    check(model, torch.randn(8, 8).double(), mesh=(2, 2) if number % 4 > 1 else (2,))


@pytest.mark.parametrize("normed", LAYERS.values(), ids=LAYERS.keys())
def test_layers_that_compute_their_weight(normed: Callable[[nn.Linear], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Layer(lambda y, w: y @ w, normed(nn.Linear(8, 16).double())).double()
    check(marked(model, 0), torch.randn(8, 8).double())


DROPPED = ("norm", "order", "routed")


@pytest.mark.parametrize("name", DROPPED)
def test_a_collective_that_is_left_out_is_noticed(name: str) -> None:
    torch.manual_seed(0)
    model = marked(Layer(AFTER[name]).double(), 0)
    batch = torch.randn(8, 8).double()
    step = cf.compile(model, OFF, parallel_mode="semi_auto", mesh=(2,), device_num=2, full_batch=True, form="step")
    lowered = step.lower(batch)
    right = cf.lockstep(lowered)(batch)
    names = [node.meta["commfuse"].name for node in lowered.program.collectives()]
    assert names and right.disagreement is None
    for dropped in names:
        found = cf.lockstep(lowered, drop=[dropped])(batch)
        if found.disagreement is None:  # ranks agree on what is wrong
            same = torch.allclose(found.loss, right.loss, rtol=1e-9)
            assert not same or any(
                not torch.allclose(found.grads[name], right.grads[name], rtol=1e-7, atol=1e-10) for name in right.grads
            ), f"without {dropped} nothing is noticed"
        else:
            assert found.disagreement.node.rsplit("/", 1)[0] == dropped.rsplit("/", 1)[0]


def test_a_reduction_inside_of_an_operation_is_compared() -> None:
    """What a rank has before it differs from rank to rank, what it has after it does not."""
    torch.manual_seed(0)
    model = marked(Layer(AFTER["extremes"]).double(), 0)
    batch = torch.randn(8, 8).double()
    step = cf.compile(
        copy.deepcopy(model), OFF, parallel_mode="semi_auto", mesh=(2,), device_num=2, full_batch=True, form="step"
    )
    lowered = step.lower(batch)
    inside = [node for node in lowered.program.collectives() if "/step." in node.meta["commfuse"].name]
    assert {node.args[1] for node in inside} >= {"max"}
    for node in inside:
        if node.meta["commfuse"].spec.dtype == torch.int32:
            continue  # tells where a NaN is: on no rank
        name = node.meta["commfuse"].name
        found = cf.lockstep(lowered, drop=[name])(batch).disagreement
        assert found is not None and found.node.rsplit("/", 1)[0] == name.rsplit("/", 1)[0]
