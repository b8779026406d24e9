"""Training loops that people write around DistributedDataParallel, for it and for a compiled module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests import captures

Loop = Callable[[Any, nn.Module], Iterator[Any]]
"""A training loop: takes what wraps the model and the model, and yields what is to be compared."""


class Net(nn.Module):
    """Dropout, BatchNorm, a tied weight and frozen parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.25)
        self.to(dtype)
        captures.share(self, Net, any_mesh=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        out: torch.Tensor = self.head(self.dropout(torch.tanh(self.second(h)) + self.tied(self.frozen(h))))
        return out


def batch(step: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def layers(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own."""
    return [module for module in model.modules() if module._parameters]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """One parameter is added to the optimizer later."""
    late, *params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        optimizer.step()
    yield list(model.parameters())


def no_zero_grad(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Several backwards before a step; the user keeps an old gradient, and has set another one."""
    kept, last = None, list(model.parameters())[2]
    last.grad = torch.ones(*last.shape, 2, dtype=last.dtype)[..., 0]
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


def sync_of_the_forward(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """What counts is where the forward has been, not the backward."""
    with wrapped.no_sync():
        loss = wrapped(batch(0)).square().mean()
    loss.backward()
    yield grads(model)
    loss = wrapped(batch(1)).square().mean()
    with wrapped.no_sync():
        loss.backward()
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
    parts = layers(model)
    one, whole = parts[len(parts) // 3], parts[-1]
    for step in range(4):
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=step > 0)  # it has to be made anew
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)
        model.zero_grad()
        whole.requires_grad_(step % 2 == 0)
        one.weight.requires_grad_(step % 2 == 1)


def optimizer_in_backward(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """DistributedDataParallel shows such a hook the gradient of its rank; there the update comes after the backward."""

    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            assert param.grad is not None
            param -= 0.1 * param.grad
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
    def doubled(grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else grad * 2

    parts = layers(model)
    one, middle = parts[len(parts) // 3], parts[len(parts) // 2]
    one.register_forward_hook(lambda module, args, out: out * 1.5)
    middle.register_full_backward_hook(lambda module, given, out: tuple(map(doubled, given)))
    one.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    if hasattr(model, "python"):  # which no graph of Dynamo reads
        model.get_parameter("python.0.weight").register_hook(lambda grad: grad + 1)
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
        yield torch.autograd.grad(target(x).square().mean(), [*params, x], allow_unused=True)  # ids need no gradient
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
    plain, no_zero_grad, accumulation, attribute_of_sync, nested_no_sync, sync_of_the_forward,
    forward_without_backward, evaluation, inputs_with_gradients, clipping, freezing, optimizer_in_backward, hooks,
    loss_scaled, siamese, two_losses, through_one_forward, local_gradients, part_of_the_output,
]  # fmt: skip


def assert_as_ddp(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    """The same bits on up to two ranks, whose sums have one order only."""
    tolerance = 0 if dist.get_world_size() <= 2 else tolerance
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_buffers_are_equal(model: nn.Module) -> None:
    """All ranks have the same buffers. They call this together."""
    for buffer in model.buffers():
        held = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(held, buffer)
        assert all(torch.equal(each, held[0]) for each in held)
