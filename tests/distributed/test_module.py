"""Besides its loops: the module form does what DistributedDataParallel does, or says what it does not do."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import commfuse_fx as cf
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.loops_of_modules import Net, assert_as_ddp, assert_buffers_are_equal, batch, grads, sgd
from tests.oracle import OPTIMAL, SLOW

pytestmark = pytest.mark.dist


class Branches(nn.Module):
    """Which layer it uses depends on its own attribute; one it never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]).double()
        self.empty = nn.Parameter(torch.ones(0, 3, dtype=torch.float64))
        self.branch = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[3](torch.tanh(self.layers[self.branch](x)))
        return out


def unused_parameters(accumulates: bool) -> None:
    """Of the first three layers ranks take others, and the third none."""
    model = Branches()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, find_unused_parameters=True, cpu_kernels=False)
    other = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)
    kept = torch.full_like(model.layers[2].weight, 0.5)
    for each in (model, twin):
        each.layers[2].weight.grad = kept.clone()
    for step in range(4):
        for each, call in ((model, wrapped), (twin, other)):
            each.branch = (dist.get_rank() + step) % 2 if step < 3 else 0
            if accumulates and step % 2:
                with call.no_sync():
                    call(batch(step + 10)).square().mean().backward()
            call(batch(step)).square().mean().backward()
        assert_as_ddp(grads(model), grads(twin))
        if not accumulates:
            for each in (model, twin):
                for layer in (*each.layers[:2], each.layers[3]):
                    layer.zero_grad()
    assert torch.equal(model.layers[2].weight.grad, kept) and model.layers[2].bias.grad is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("accumulates", [False, True])
def test_unused_parameters(ranks: Ranks, accumulates: bool, size: int) -> None:
    ranks.values(unused_parameters, accumulates, size=size)


def reached_before() -> None:
    """A parameter that a rank reaches in a micro-batch only, and another rank not at all."""
    model = Branches()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, find_unused_parameters=True, cpu_kernels=False)
    other = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)
    for step in range(3):
        for each, call in ((model, wrapped), (twin, other)):
            with call.no_sync():
                each.branch = 2 if dist.get_rank() == 0 else 0
                call(batch(step + 10)).square().mean().backward()
            each.branch = dist.get_rank()
            call(batch(step)).square().mean().backward()
        assert_as_ddp(grads(model), grads(twin))
        for each in (model, twin):
            each.zero_grad(set_to_none=step == 0)


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_reached_without_reducing_counts(ranks: Ranks, size: int) -> None:
    ranks.values(reached_before, size=size)


class Heads(nn.Module):
    """Three outputs, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(self.body(x)) for head in self.heads]


def unused_outputs() -> None:
    """Losses of other outputs in turn; the one of all outputs comes last, and others after it."""
    model = Heads()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, find_unused_parameters=True, cpu_kernels=False)
    other = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)
    for step, used in enumerate(((0,), (0, 1), (2,), (0, 1, 2), (1,), (0, 1, 2))):
        for call in (wrapped, other):
            outputs = call(batch(step))
            torch.stack([outputs[number] for number in used]).square().mean().backward()
        assert_as_ddp(grads(model), grads(twin))
        for each in (model, twin):
            each.zero_grad()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_that_use_other_outputs_in_turn(ranks: Ranks, size: int) -> None:
    ranks.values(unused_outputs, size=size)


def sums() -> str:
    """Sums over the ranks, of several backwards and of micro-batches."""
    model = Branches()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, gradients_mean=False, cpu_kernels=False)
    for step in range(4):
        wrapped(batch(step)).square().mean().backward()
        twin(batch(step)).square().mean().backward()
        if step == 1:
            summed(model, twin)
            for each in (model, twin):
                each.zero_grad(set_to_none=False)
            for part in range(2):
                with wrapped.no_sync():
                    wrapped(batch(10 + part)).square().mean().backward()
                twin(batch(10 + part)).square().mean().backward()
    summed(model, twin)
    with pytest.raises(cf.NotAvailableError) as error, wrapped.no_sync():
        wrapped(batch(0)).square().mean().backward()
    return str(error.value)


def summed(model: nn.Module, twin: nn.Module) -> None:
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            total = other.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(param.grad, total, rtol=1e-12, atol=1e-12)


def test_sums_of_gradients(ranks: Ranks) -> None:
    for text in ranks.values(sums):
        assert "gradients_mean=False: .grad of layers." in text and "zero_grad()" in text


def uneven(batches: list[int], options: dict[str, Any]) -> None:
    """Ranks with different numbers of batches, beside DistributedDataParallel."""
    model = Net()
    twin = copy.deepcopy(model)
    wrapped, other = cf.compile(model, cpu_kernels=False), nn.parallel.DistributedDataParallel(twin)
    for call, each in ((wrapped, model), (other, twin)):
        torch.manual_seed(dist.get_rank())
        optimizer = sgd(each)
        with call.join(**options) if len(batches) == 2 else Join([call], **options):
            for step in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                call(batch(step)).square().mean().backward()
                optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-12, atol=1e-12)
    # A module sends buffers behind the forward that has changed them, and so those of a rank that stops then.
    assert_buffers_are_equal(model)
    wrapped(batch(9)).square().mean().backward()  # and on with it


@pytest.mark.parametrize("batches", [[4, 2], [1, 4], [0, 3], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=["of all", "of active"])
def test_ranks_with_different_numbers_of_batches(ranks: Ranks, batches: list[int], options: dict[str, Any]) -> None:
    ranks.values(uneven, batches, options, size=len(batches))


def copies() -> list[str]:
    compiled, found = cf.compile(Net()), []
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(cf.NotAvailableError) as error:
            copied(compiled)
        found.append(str(error.value))
    copy.deepcopy(compiled.module)
    pickle.dumps(compiled.state_dict())
    return found


def test_a_module_of_several_ranks_says_what_to_copy(ranks: Ranks) -> None:
    for found in ranks.values(copies):
        assert all("copy or save its model (model.module, model.state_dict())" in text for text in found)


def early_end() -> str:
    wrapped = cf.compile(Net())
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                wrapped(batch(step)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_raise_when_one_has_no_more_batches(ranks: Ranks) -> None:
    assert all("exhausted" in text for text in ranks.values(early_end))


def fewer_batches() -> None:
    wrapped = cf.compile(Net())
    for step in range(2 if dist.get_rank() == 0 else 3):
        wrapped(batch(step)).square().mean().backward()


def test_a_rank_with_fewer_batches_is_named_on_the_others(ranks: Ranks) -> None:
    stopped, *others = run_soon(ranks, fewer_batches, size=3)
    assert stopped.ok, stopped.details
    for other in others:
        assert other.error.startswith("CollectiveError: "), other.details
        assert "no vote has come from rank 0" in other.error and "in the join() of a compiled module" in other.error


def lazy_models() -> None:
    for lazy in (nn.LazyLinear(2), nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d(affine=False))):
        with pytest.raises(cf.CaptureError, match="is not initialised yet: run the model once on a batch first"):
            cf.compile(lazy)


def test_parameters_and_buffers_without_values_are_named(ranks: Ranks) -> None:
    ranks.values(lazy_models)


def start_values(options: dict[str, Any]) -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(dist.get_rank())
    cf.compile(model, **options)
    return [*(float(param.sum()) for param in model.parameters()), float(model[1].running_mean.sum())]


def test_ranks_begin_with_rank_0s_values(ranks: Ranks) -> None:
    first, second, third = ranks.values(start_values, {}, size=3)
    assert first == second == third
    first, second = ranks.values(start_values, {"parameter_broadcast": False})
    assert first != second


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(6, 6).double(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("of the model")
        out: torch.Tensor = self.layer(x)
        return out


def fails_in_forward() -> tuple[str, float]:
    torch.manual_seed(0)
    model = Failing()
    wrapped = cf.compile(model)
    wrapped(batch(0)).sum().backward()
    model.zero_grad()
    model.fails = dist.get_rank() == 1
    began = time.monotonic()
    with pytest.raises(KeyError if model.fails else cf.PeerFailedError) as error:
        wrapped(batch(1)).sum().backward()
    seconds = time.monotonic() - began
    assert all(param.grad is None for param in model.parameters())
    model.fails = False
    wrapped(batch(2)).sum().backward()  # all go on
    return str(error.value), seconds


def test_a_rank_that_fails_in_its_forward_is_named_at_once(ranks: Ranks) -> None:
    (told, waited), _ = ranks.values(fails_in_forward)
    assert "rank 1: KeyError: 'of the model'" in told and waited < 30


def fails_in_backward() -> str:
    torch.manual_seed(0)
    model = Failing()
    wrapped = cf.compile(model)
    out = wrapped(batch(0))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.layer.weight.add_(1)
    x = batch(0).requires_grad_()
    wrapped(x).sum().backward()
    out = wrapped(x)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.layer.weight.add_(1)
    with pytest.raises(RuntimeError if dist.get_rank() == 1 else cf.PeerFailedError) as error:
        out.sum().backward()
    return str(error.value)


def test_a_rank_that_fails_in_its_backward_is_named_at_once(ranks: Ranks) -> None:
    told, _ = ranks.values(fails_in_backward)
    assert "rank 1: RuntimeError" in told and "modified by an inplace operation" in told


def plans_by_cost() -> list[str]:
    """Batches of other sizes on every rank, in mode "optimal" on a slow network: gradients are those of DDP."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, cpu_kernels=False, comm_fusion=OPTIMAL, cluster=SLOW)
    other = nn.parallel.DistributedDataParallel(twin)
    for step in range(3):
        x = batch(step, rows=2 + 50 * dist.get_rank() + step)
        for each, call in ((model, wrapped), (twin, other)):
            each.zero_grad()
            call(x).square().mean().backward()
        torch.testing.assert_close(grads(model), grads(twin), rtol=0, atol=0)
    found = wrapped.lower(x).collectives
    return [str(each.members) for each in found]


def test_ranks_with_batches_of_other_sizes_plan_alike(ranks: Ranks) -> None:
    first, second = ranks.values(plans_by_cost)
    assert first == second and len(first) > 1


class Sum(nn.Module):
    """Two parameters have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.zeros(4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.one + self.other)


def gradients_that_are_held(form: str) -> None:
    """Memory of gradients is used again once they are gone; what the loop holds keeps its values."""
    model, twin = (nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh(), nn.Linear(6, 3).double()) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    wrapped = cf.compile(model, form=form, loss_fn=loss if form == "step" else None, parameter_broadcast=True)
    other = nn.parallel.DistributedDataParallel(twin)
    addresses, held, values = [], None, None
    for step in range(6):
        model.zero_grad()
        twin.zero_grad()
        x = batch(step)
        wrapped(x, x) if form == "step" else loss(wrapped(x), x).backward()
        loss(other(x), x).backward()
        torch.testing.assert_close(grads(model), grads(twin), rtol=1e-10, atol=1e-12)
        addresses.append(model[2].weight.grad.data_ptr())
        if step == 1:
            held = model[2].weight.grad[1]
            values = held.clone()
        if held is not None:
            assert torch.equal(held, values)
        if step == 3:
            held = None
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3] == addresses[5]


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target[:, :3]).square().mean()


@pytest.mark.parametrize("form", ["module", "step"])
def test_gradients_that_are_held_keep_their_values(ranks: Ranks, form: str) -> None:
    ranks.values(gradients_that_are_held, form)


def equal_gradients() -> None:
    model = Sum()
    wrapped = cf.compile(model)
    for _ in range(3):
        model.zero_grad()
        wrapped(torch.full((2, 4), 1.0 + dist.get_rank()).double()).sum().backward()
        model.one.grad.mul_(2)
        want = torch.full((4,), 3.0).double()
        assert torch.equal(model.other.grad, want) and torch.equal(model.one.grad, 2 * want)


def test_parameters_with_equal_gradients_have_their_own(ranks: Ranks) -> None:
    ranks.values(equal_gradients)
