"""Train a model compiled and in plain eager PyTorch, and compare everything that training leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.capture.guards.tree import flatten
from commfuse_fx.capture.loss import compute_loss, name_arguments

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class _NoScopes:
    def scope(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def eager_loss(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    loss, _ = compute_loss(model, name_arguments(args, kwargs, loss_fn), loss_fn, _NoScopes())  # type: ignore[arg-type]
    return loss


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: it turns rounding noise in gradients that are zero in theory into whole steps.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    return copy.deepcopy((args, kwargs))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in flatten(value, "")[0]]


def assert_trains_as_eager(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tolerance: float = 1e-10,
    whole_step: bool = True,
) -> None:
    """Three steps: loss, gradients, parameters, buffers and the random state after them must agree.

    `whole_step`: the optimizer is compiled too; otherwise it runs outside, on the gradients of each step.
    """
    same = {"rtol": tolerance, "atol": tolerance}
    eager, compiled = model, copy.deepcopy(model)
    eager_optimizer, optimizer = _optimizer(eager), _optimizer(compiled)
    step = cf.compile(compiled, loss_fn=loss_fn, optimizer=optimizer if whole_step else None, form="step")
    for number in range(3):
        args, kwargs = _own(*batches[number % len(batches)])
        own_args, own_kwargs = _own(args, kwargs)
        torch.manual_seed(number)
        eager_optimizer.zero_grad()
        with around():
            want = eager_loss(eager, loss_fn, args, kwargs)
        want.backward()
        wanted_state = torch.get_rng_state()
        torch.manual_seed(number)
        with around():
            loss = step(*own_args, **own_kwargs)
        for a, b in zip(_tensors((args, kwargs)), _tensors((own_args, own_kwargs)), strict=True):
            torch.testing.assert_close(b, a, **same, msg=lambda m, n=number: f"an input after step {n}: {m}")
        torch.testing.assert_close(loss, want.detach(), **same, msg=lambda m, n=number: f"loss of step {n}: {m}")
        assert torch.equal(torch.get_rng_state(), wanted_state), f"random state after step {number}"
        if not whole_step:
            for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), f"{name} has a gradient on one side only"
                if p.grad is not None:
                    torch.testing.assert_close(q.grad, p.grad, **same, msg=lambda m: f"grad of {name}: {m}")  # noqa: B023
            optimizer.step()
            optimizer.zero_grad()
        eager_optimizer.step()
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q, p, **same, msg=lambda m: f"parameter {name}: {m}")  # noqa: B023
    for (name, a), b in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(b, a, **same, msg=lambda m: f"buffer {name}: {m}")  # noqa: B023
    eager.eval(), compiled.eval()
    args, kwargs = _own(*batches[0])
    own_args, own_kwargs = _own(args, kwargs)
    with torch.no_grad(), around():
        torch.manual_seed(7)
        want = eager_loss(eager, loss_fn, args, kwargs)
        torch.manual_seed(7)
        torch.testing.assert_close(step(*own_args, **own_kwargs), want, **same, msg=lambda m: f"evaluation: {m}")


def assert_gradients_as_eager(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    tolerance: float = 0.0,
) -> None:
    """One step without an optimizer: loss, gradients, buffers and the random state after it must agree."""
    same = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    eager, compiled = model, copy.deepcopy(model)
    given, own = _own(args, kwargs or {}), _own(args, kwargs or {})
    torch.manual_seed(0)
    want = eager_loss(eager, loss_fn, *given)
    want.backward()
    wanted_state = torch.get_rng_state()
    torch.manual_seed(0)
    loss = cf.compile(compiled, loss_fn=loss_fn, form="step")(*own[0], **own[1])
    torch.testing.assert_close(loss, want.detach(), **same)
    assert torch.equal(torch.get_rng_state(), wanted_state), "random state"
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **same, msg=lambda m: f"grad of {name}: {m}")  # noqa: B023
        assert p.grad is None or q.grad is None or p.grad.stride() == q.grad.stride(), f"layout of the grad of {name}"
    for (name, a), b in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(b, a, **same, msg=lambda m: f"buffer {name}: {m}")  # noqa: B023


def assert_fully_annotated(step: cf.CompiledStep | Any, *args: Any, **kwargs: Any) -> None:
    """Every op says which phase and module it belongs to, and forward ops say where in the user's code they stand."""
    for node in step.lower(*args, **kwargs).graph_module.graph.nodes:
        if node.op == "call_function":
            details = node.meta["commfuse"]
            assert details.phase in ("forward", "backward", "update"), node
            if details.phase == "forward":
                assert details.source, f"{details.name} has no source"
