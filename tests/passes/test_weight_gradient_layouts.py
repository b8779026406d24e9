"""Gradients of convolutions' weights have the strides that their graph says, and those of the eager loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.kernels.convolutions import convolution_weight_gradient
from tests.models import Batch, Case
from tests.oracle import MakeOptimizer, assert_same, by_class, make_world, train_reference, train_world

OPS = (torch.ops.aten.convolution_backward.default, convolution_weight_gradient)
PLAIN, LAST = torch.contiguous_format, torch.channels_last


class Shape(NamedTuple):
    """Of a model of four convolutions, and of what it is given. apart: how many weight gradients get their own op."""

    maps: tuple[int, int, int]  # images, rows, columns
    apart: int
    channels: tuple[int, int] = (32, 32)
    kernel: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (1, 1)
    weight: torch.memory_format = PLAIN
    given: torch.memory_format = PLAIN

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        ins, outs = self.channels
        convolution = partial(nn.Conv2d, kernel_size=self.kernel, padding=self.padding)
        layers = [convolution(ins, outs), nn.ReLU()]
        for _ in range(3):
            layers += [convolution(outs, outs), nn.ReLU()]
        return nn.Sequential(*layers).to(memory_format=self.weight)

    def batch(self, rows: int) -> Batch:
        """Images, and the weights of the outputs' means."""
        torch.manual_seed(1)
        x = torch.randn(rows, self.channels[0], *self.maps[1:]).to(memory_format=self.given)
        return x, torch.randn(rows, self.channels[1])


SHAPES = {
    "pixels": Shape((600, 1, 1), apart=4, channels=(64, 64)),
    "pixels, weight last": Shape((600, 1, 1), apart=4, channels=(64, 64), weight=LAST),
    "pixels, all last": Shape((600, 1, 1), apart=4, channels=(64, 64), weight=LAST, given=LAST),
    "a row": Shape((300, 1, 8), apart=0, channels=(64, 64)),
    "a column": Shape((300, 8, 1), apart=0, channels=(64, 64)),
    "a row, wide kernel": Shape((40, 1, 40), apart=4, kernel=(1, 3), padding=(0, 1)),
    "a column, tall kernel": Shape((40, 40, 1), apart=4, kernel=(3, 1), padding=(1, 0)),
    "an output of a pixel": Shape((40, 9, 9), apart=0, padding=(0, 0)),
    "an image": Shape((1, 48, 48), apart=4),
    "an image, weight last": Shape((1, 48, 48), apart=3, weight=LAST),
    "maps": Shape((8, 24, 20), apart=4),
    "maps, given last": Shape((8, 24, 20), apart=4, given=LAST),
    "maps, weight last": Shape((8, 24, 20), apart=3, weight=LAST),
    "from one channel": Shape((8, 24, 24), apart=3, channels=(1, 32)),
    "to one channel": Shape((8, 24, 24), apart=0, channels=(32, 1)),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(autouse=True)
def by_tiles_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a processor without AVX-512."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def weighted(output: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (output.mean((2, 3)) * weights).sum() / weights.shape[0]


class Recorded(TorchDispatchMode):
    """Keeps what the ops of a backward return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in OPS:
            self.results.append((func, result))
        return result


def layout(value: torch.Tensor | TensorSpec) -> tuple[list[int], list[int]]:
    """Shape and strides; strides of dimensions of size 1 mean nothing."""
    stride = value.stride if isinstance(value, TensorSpec) else value.stride()
    return list(value.shape), [step for size, step in zip(value.shape, stride, strict=True) if size > 1]


def layouts(values: Any) -> list[tuple[list[int], list[int]] | None]:
    """Of one value, or of several, some of which may be None."""
    many = values if isinstance(values, (tuple, list)) else (values,)
    return [None if value is None else layout(value) for value in many]


@each_shape
def test_results_have_the_strides_that_the_graph_says(shape: Shape) -> None:
    step = cf.compile(shape.model(), loss_fn=weighted)
    batch = shape.batch(shape.maps[0])
    nodes = [node for node in step.lower(*batch)._program.graph.nodes if node.target in OPS]
    with Recorded() as recorded:
        step(*batch)
    assert sum(node.target is convolution_weight_gradient for node in nodes) == shape.apart
    assert [node.target for node in nodes] == [op for op, _ in recorded.results]
    for node, (_, result) in zip(nodes, recorded.results, strict=True):
        assert layouts(info(node).spec) == layouts(result), info(node).name


@each_shape
def test_gradients_have_the_strides_and_numbers_of_the_eager_loop(shape: Shape) -> None:
    model, batch = shape.model(), shape.batch(shape.maps[0])
    mine = copy.deepcopy(model)
    cf.compile(mine, loss_fn=weighted)(*batch)
    weighted(model(batch[0]), batch[1]).backward()
    for have, want in zip(mine.parameters(), model.parameters(), strict=True):
        assert have.grad is not None and want.grad is not None
        assert layout(have.grad) == layout(want.grad)
        torch.testing.assert_close(have.grad, want.grad, rtol=1e-4, atol=5e-5 * float(want.grad.abs().max()))


OPTIMIZERS = {
    "momentum": by_class(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": by_class(torch.optim.AdamW, lr=1e-4),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("ranks", [1, 2])
@each_shape
def test_two_steps_are_those_of_the_eager_loop(shape: Shape, ranks: int, make_optimizer: MakeOptimizer) -> None:
    case = Case("layouts", shape.model, shape.batch, weighted, coupled=True)
    batches = [shape.batch(shape.maps[0] * ranks)] * 2
    want = train_reference(case, shape.model(), batches, ranks, make_optimizer)
    world = make_world(case, shape.model(), ranks, make_optimizer)
    train_world(world, batches)
    assert_same(world.models, want, 2e-5)
