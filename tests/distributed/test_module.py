"""The module form does what DistributedDataParallel does, on one, two and three ranks."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_modules import MODELS
from tests.oracle import OPTIMAL, SLOW

pytestmark = pytest.mark.dist

Loop = Callable[[Any, nn.Module], Iterator[Any]]
"""A training loop: takes what wraps the model and the model, and yields what is to be compared."""


class Net(nn.Module):
    """Dropout, BatchNorm, a tied weight, a parameter without use and a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.25)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        out: torch.Tensor = self.head(self.dropout(torch.tanh(self.second(h)) + self.frozen(h)))
        return out


def batch(step: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        optimizer.step()
    yield list(model.parameters())


def no_zero_grad(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Several backwards before a step; the user keeps an old gradient."""
    kept = None
    for step in range(3):
        wrapped(batch(step)).square().mean().backward()
        kept = kept if kept is not None else next(model.parameters()).grad
        yield grads(model), kept.clone() if kept is not None else None


def accumulation(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(3):
        model.zero_grad()
        with wrapped.no_sync():
            for part in range(2):
                wrapped(batch(10 * step + part)).square().mean().backward()
            yield grads(model)
        wrapped(batch(10 * step + 5)).square().mean().backward()
        yield grads(model)


def attribute_of_sync(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(4):
        wrapped.require_backward_grad_sync = step % 2 == 1
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        if step % 2:
            model.zero_grad()


def nested_no_sync(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    try:
        with wrapped.no_sync():
            with wrapped.no_sync():
                wrapped(batch(0)).square().mean().backward()
            wrapped(batch(1)).square().mean().backward()
            raise KeyError
    except KeyError:
        pass
    yield grads(model)
    wrapped(batch(2)).square().mean().backward()
    yield grads(model)


def forward_without_backward(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(2):
        wrapped(batch(step + 20))
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        with torch.no_grad():
            yield wrapped(batch(step + 30))


def evaluation(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    wrapped(batch(0)).square().mean().backward()
    wrapped.eval()
    assert not model.training
    with torch.no_grad():
        yield wrapped(batch(1))
    wrapped(batch(2)).square().mean().backward()  # fine-tuning with frozen statistics
    yield grads(model)
    wrapped.train()
    wrapped(batch(3)).square().mean().backward()
    yield grads(model)


def inputs_with_gradients(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(2):
        x = batch(step).requires_grad_()
        h = x * 2
        wrapped(h).square().mean().backward()
        yield x.grad, grads(model)


def clipping(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch(step)).square().mean().backward()
        yield nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        yield list(model.parameters())


def freezing(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Parameters that are frozen and unfrozen, by what they are and by what they belong to."""
    assert isinstance(model, Net)
    for step in range(4):
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=step > 0)  # it has to be made anew
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        model.zero_grad()
        model.frozen.requires_grad_(step % 2 == 0)
        model.second.weight.requires_grad_(step % 2 == 1)


def optimizer_in_backward(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """DistributedDataParallel shows such a hook the gradient of its rank; there the update comes after the backward."""

    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            param -= 0.1 * param.grad  # type: ignore[operator]
        param.grad = None

    params = [param for param in model.parameters() if param.requires_grad]
    is_ours = isinstance(wrapped, cf.CompiledModule)
    for param in params if is_ours else ():
        param.register_post_accumulate_grad_hook(update)
    for step in range(3):
        wrapped(batch(step)).square().mean().backward()
        for param in () if is_ours else params:
            update(param)
        yield list(model.parameters())


def hooks(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    assert isinstance(model, Net)
    model.second.register_forward_hook(lambda module, args, out: out * 1.5)
    model.first.register_full_backward_hook(lambda module, given, out: (None if given[0] is None else given[0] * 2,))
    model.second.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    for step in range(2):
        out = wrapped(batch(step))
        out.register_hook(lambda grad: grad * 3)
        out.square().mean().backward()
        yield grads(model)
        model.zero_grad()


def loss_scaled(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(2):
        out = wrapped(batch(step))
        (out[:, 0].sum() * 1e3 + out.exp().mean()).backward()
        yield grads(model)
        model.zero_grad()


def siamese(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Several forwards before one backward; DistributedDataParallel does that under static graphs only, so that its
    side adds up what each forward gives."""
    for step in range(3):
        if isinstance(wrapped, cf.CompiledModule):
            first, second = wrapped(batch(step)), wrapped(batch(step + 10))
            (first - second.roll(1, 0)).square().mean().backward()
        else:
            with wrapped.no_sync():
                first, second = model(batch(step)), model(batch(step + 10))
                (first - second.roll(1, 0)).square().mean().backward()
            _reduce(model)
        yield grads(model), [buffer.clone() for buffer in model.buffers()] if dist.get_rank() == 0 else []
        model.zero_grad()


def two_losses(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Of two forwards, each with a backward of its own."""
    for step in range(2):
        wrapped(batch(step)).square().mean().backward()
        wrapped(batch(step + 10)).abs().mean().backward()
        yield grads(model)
        model.zero_grad()


def _reduce(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
            dist.all_reduce(param.grad)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def through_one_forward(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Two backwards through one forward: both reduce, which DistributedDataParallel does for the first only."""
    for step in range(2):
        if isinstance(wrapped, cf.CompiledModule):
            out = wrapped(batch(step))
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
        else:
            out = model(batch(step))
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
            _reduce(model)
        yield grads(model)
        model.zero_grad()


def local_gradients(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """`torch.autograd.grad` sends nothing: ranks may call it as they please."""
    x = batch(0).requires_grad_()
    params = [param for param in model.parameters() if param.requires_grad]
    for _ in range(dist.get_rank() + 1):
        target = wrapped if isinstance(wrapped, cf.CompiledModule) else model
        torch.manual_seed(5)
        yield torch.autograd.grad(target(x).square().mean(), [*params, x])
    assert all(param.grad is None for param in params)
    torch.manual_seed(7 + dist.get_rank())
    wrapped(x).square().mean().backward()
    yield grads(model)


def part_of_the_output(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """A loss over a view of the output, which is changed in place before."""
    for step in range(2):
        out = wrapped(batch(step))
        out += 1
        out[:, 2].exp().sum().backward()
        yield grads(model)
        model.zero_grad()


LOOPS: list[Loop] = [
    plain, no_zero_grad, accumulation, attribute_of_sync, nested_no_sync, forward_without_backward, evaluation,
    inputs_with_gradients, clipping, freezing, optimizer_in_backward, hooks, loss_scaled,
    siamese, two_losses, through_one_forward, local_gradients, part_of_the_output,
]  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net() if name == "net" else MODELS[name]().double()


def compare(number: int, options: dict[str, Any], name: str = "net") -> int:
    loop = LOOPS[number]
    model = made(name)
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, **options)
    other = nn.parallel.DistributedDataParallel(twin)
    torch.manual_seed(3 + dist.get_rank())
    state = torch.get_rng_state()
    ours = list(loop(wrapped, model))
    torch.set_rng_state(state)
    theirs = list(loop(other, twin))
    by_hand = loop in (
        siamese,
        through_one_forward,
    )  # what DistributedDataParallel cannot do is summed in another order
    exact = dist.get_world_size() <= 2 and not options.get("cpu_kernels", True) and not by_hand
    torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-10, atol=0 if exact else 1e-10)
    return len(ours)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_a_loop_gives_what_ddp_gives(ranks: Ranks, number: int, size: int) -> None:
    assert min(ranks.values(compare, number, {"cpu_kernels": False}, size=size))


SOME = [LOOPS.index(loop) for loop in (accumulation, siamese)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", SOME, ids=[LOOPS[number].__name__ for number in SOME])
def test_models_of_other_kinds(ranks: Ranks, number: int, name: str) -> None:
    assert min(ranks.values(compare, number, {"cpu_kernels": False}, name))


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
        torch.testing.assert_close(grads(model), grads(twin), rtol=0, atol=0)
        if not accumulates:
            for each in (model, twin):
                for layer in (*each.layers[:2], each.layers[3]):
                    layer.zero_grad()
    assert torch.equal(model.layers[2].weight.grad, kept) and model.layers[2].bias.grad is None


@pytest.mark.parametrize("accumulates", [False, True])
def test_unused_parameters(ranks: Ranks, accumulates: bool) -> None:
    ranks.values(unused_parameters, accumulates)


def other_branches() -> str:
    model = Branches()
    wrapped = cf.compile(model)
    model.branch = dist.get_rank()
    with pytest.raises(cf.PlanMismatchError) as error:
        wrapped(batch(0)).square().mean().backward()
    assert all(param.grad is None for param in model.parameters())
    model.branch = 0
    wrapped(batch(0)).square().mean().backward()  # nothing is lost
    return str(error.value)


def test_ranks_that_use_other_parameters_are_told(ranks: Ranks) -> None:
    for text in ranks.values(other_branches):
        assert "rank 1 has no gradient of layers.0.weight" in text and "find_unused_parameters=True" in text


def same_parameters() -> None:
    """Ranks that compute other things with the same parameters agree."""
    model = Branches()
    wrapped = cf.compile(model)
    rows = 3 + dist.get_rank()
    model.register_forward_hook((lambda module, args, out: out * 2) if dist.get_rank() else lambda *_: None)
    for _ in range(2):
        wrapped(batch(0, rows)).square().mean().backward()
    checks = [torch.zeros_like(model.layers[0].weight.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(checks, model.layers[0].weight.grad)
    assert all(torch.equal(each, checks[0]) for each in checks)


def test_ranks_may_take_different_branches(ranks: Ranks) -> None:
    ranks.values(same_parameters)


def uneven(batches: list[int], options: dict[str, Any]) -> None:
    """Ranks with different numbers of batches, beside DistributedDataParallel."""
    model = Net()
    twin = copy.deepcopy(model)
    wrapped, other = cf.compile(model, cpu_kernels=False), nn.parallel.DistributedDataParallel(twin)
    for call, each in ((wrapped, model), (other, twin)):
        torch.manual_seed(dist.get_rank())
        optimizer = sgd(each)
        with call.join(**options):
            for step in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                call(batch(step)).square().mean().backward()
                optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-12, atol=1e-12)
    # A module sends buffers behind the forward that has changed them, and so those of a rank that stops then.
    for buffer in model.buffers():
        held = [torch.empty_like(buffer) for _ in batches]
        dist.all_gather(held, buffer)
        assert all(torch.equal(each, held[0]) for each in held)
    wrapped(batch(9)).square().mean().backward()  # and on with it


@pytest.mark.parametrize("batches", [[4, 2], [1, 4], [0, 3], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=["of all", "of active"])
def test_ranks_with_different_numbers_of_batches(ranks: Ranks, batches: list[int], options: dict[str, Any]) -> None:
    ranks.values(uneven, batches, options, size=len(batches))


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


def late_gradients() -> list[str]:
    """A penalty on parameters, and calls of the model itself beside those of the module."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commfuse_fx.runtime").addHandler(handler)
    model, twin = (nn.Linear(6, 6).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    wrapped, other = cf.compile(model, cpu_kernels=False), nn.parallel.DistributedDataParallel(twin)
    for step in range(3):
        for each, call in ((model, wrapped), (twin, other)):
            loss = call(batch(step)).square().mean()
            (loss + 0.1 * each.weight.square().sum() if step else loss).backward()
        torch.testing.assert_close(grads(model), grads(twin), rtol=1e-12, atol=1e-12)
        said.append("ready")
    logging.getLogger("commfuse_fx.runtime").removeHandler(handler)
    return said


def test_gradients_that_do_not_come_from_the_module_are_named(ranks: Ranks) -> None:
    for said in ranks.values(late_gradients):
        assert [said[0], *said[2:]] == ["ready"] * 3 and "weight, or a parameter of its bucket, got a" in said[1]


def wrapped_twice() -> str:
    wrapped = nn.parallel.DistributedDataParallel(cf.compile(Net()))
    with pytest.raises(cf.ConfigValueError) as error:
        wrapped(batch(0))
    return str(error.value)


def test_ddp_around_a_compiled_module_is_refused(ranks: Ranks) -> None:
    assert all("a second time" in text for text in ranks.values(wrapped_twice))


def different_models() -> str:
    width = 6 + dist.get_rank()
    with pytest.raises(cf.PlanMismatchError) as error:
        cf.compile(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2)))
    return str(error.value)


def test_ranks_with_other_parameters_are_named(ranks: Ranks) -> None:
    for text in ranks.values(different_models):
        assert "rank 1 has no 0.weight: float32[6, 6]" in text and "rank 0 has no 0.weight: float32[7, 6]" in text


def start_values(options: dict[str, Any]) -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(dist.get_rank())
    cf.compile(model, **options)
    return [*(float(param.sum()) for param in model.parameters()), float(model[1].running_mean.sum())]


def test_ranks_begin_with_rank_0s_values(ranks: Ranks) -> None:
    first, second = ranks.values(start_values, {})
    assert first == second
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
