"""Cases of user code: a model, its arguments and its loss; and that three compiled steps leave what eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.capture.equivalence import assert_gradients_as_eager, assert_trains_as_eager

Case = tuple[Callable[[], nn.Module], tuple[Any, ...], Callable[..., torch.Tensor] | None]


class Cases(dict[str, Callable[[], Case]]):
    """Cases by name; as a decorator it takes one up."""

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self[make.__name__] = make
        return make

    def check(self, name: str) -> None:
        torch.manual_seed(1)
        make, args, loss = self[name]()
        assert_trains_as_eager(make(), [(args, {})], loss, whole_step=len(name) % 2 == 0)

    def check_gradients(self, name: str, tolerance: float) -> None:
        """One step, in the default dtype."""
        torch.manual_seed(1)
        make, args, loss = self[name]()
        assert_gradients_as_eager(make(), args, loss_fn=loss, tolerance=tolerance)


def mean_square(output: Any, target: Any) -> torch.Tensor:
    """A loss for any nest of outputs."""
    if isinstance(output, torch.Tensor):
        value = torch.view_as_real(output) if output.is_complex() else output
        return value.square().mean() + (target.sum() * 0 if isinstance(target, torch.Tensor) else 0)
    items = output.values() if isinstance(output, dict) else output
    return sum((mean_square(item, None) for item in items), torch.zeros((), dtype=torch.get_default_dtype()))


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


class Fn(nn.Module):
    """A linear layer and a function of (module, x): most cases are one line of user code."""

    def __init__(self, run: Callable[..., Any], inner: nn.Module | None = None, width: int = 8, **parts: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.run = run
        if inner is not None:
            self.inner = inner
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def fn(run: Callable[..., Any], *inputs: Any, loss: Any = mean_square, **parts: Any) -> Case:
    return (lambda: Fn(run, **parts)), (*inputs, r(2)), loss


def seq(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*modules)
