"""Gradients of convolutions' weights by tiles and as matrix products: the numbers, and which convolutions have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.roofline import flops_and_bytes
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.kernels import convolutions
from commfuse_fx.kernels.convolutions import convolution_weight_gradient
from commfuse_fx.kernels.winograd import tiles_pay
from commfuse_fx.passes.kernels.weight_gradients import WeightGradients
from tests.models import Batch, Case, randomised
from tests.oracle import ACROSS_STEPS, assert_same, make_world, sgd, train_reference, train_world

aten = torch.ops.aten
NAME = "commfuse.convolution_weight_gradient("

Size = tuple[int, int]


def operands(
    count: int, ins: int, outs: int, size: Size, kernel: Size, padding: Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient, input and weight; the maps lie channels last."""
    torch.manual_seed(0)
    last = torch.channels_last
    x = torch.randn(count, ins, *size).to(memory_format=last)
    weight = torch.randn(outs, ins, *kernel)
    grad = torch.randn(F.conv2d(x, weight, padding=padding).shape).to(memory_format=last)
    return grad, x, weight


SHAPES: list[tuple[int, int, int, Size, Size, Size]] = [
    (4, 32, 40, (10, 12), (3, 3), (1, 1)),
    (1, 8, 4, (7, 5), (3, 3), (1, 1)),
    (5, 6, 3, (9, 8), (3, 3), (0, 0)),
    (3, 4, 4, (6, 9), (1, 3), (0, 1)),
    (3, 4, 4, (9, 6), (3, 1), (1, 0)),
    (2, 5, 7, (8, 8), (2, 2), (0, 1)),
    (2, 3, 2, (6, 6), (3, 3), (2, 2)),
    (2, 3, 2, (3, 4), (3, 4), (0, 0)),
    (3, 3, 2, (3, 8), (3, 3), (0, 1)),
    (6, 8, 12, (16, 16), (3, 3), (1, 1)),
]
WAYS = [
    (way, shape)
    for shape in SHAPES
    for way in (convolutions._by_products, convolutions._by_onednn, convolutions._by_tiles)
    if way is not convolutions._by_tiles or shape[4] == (3, 3)
]


@pytest.mark.parametrize("chunk", [1, 20_000, 1 << 30])  # a row of tiles or an image, some, and all of them at once
@pytest.mark.parametrize(("way", "shape"), WAYS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_gradients_are_those_of_float64(
    way: Callable[..., torch.Tensor],
    shape: tuple[int, int, int, Size, Size, Size],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolutions, "_CHUNK_BYTES", chunk)
    grad, x, weight = operands(*shape)
    exact = weight.double().requires_grad_()
    F.conv2d(x.double(), exact, padding=shape[-1]).backward(grad.double())
    assert exact.grad is not None
    found = way(grad, x, weight, list(shape[-1]))
    torch.testing.assert_close(found.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", [convolutions._by_products, convolutions._by_tiles])
def test_errors_are_small_relative_to_the_largest_element(way: Callable[..., torch.Tensor]) -> None:
    grad, x, weight = operands(2, 64, 64, (16, 16), (3, 3), (1, 1))
    x[:, :, 0, 0] *= 1e6
    exact = convolutions._by_onednn(grad.double(), x.double(), weight.double(), [1, 1])
    error = (way(grad, x, weight, [1, 1]) - exact).abs().max() / exact.abs().max()
    assert float(error) < 2e-6


MANY_CHANNELS = (2, 64, 64, (20, 20), (3, 3), (1, 1))
FEW_CHANNELS = SHAPES[0]


@pytest.mark.parametrize(
    ("capability", "shape", "way"),
    [
        ("AVX2", MANY_CHANNELS, "_by_tiles"),
        ("AVX2", FEW_CHANNELS, "_by_products"),
        ("AVX512", MANY_CHANNELS, "_by_onednn"),
        ("AVX512", FEW_CHANNELS, "_by_onednn"),
    ],
)
def test_processor_and_shape_decide_how(
    capability: str, shape: tuple[int, int, int, Size, Size, Size], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("_by_tiles", "_by_products", "_by_onednn"):
        original = getattr(convolutions, name)

        def noted(*args: object, name: str = name, original: Callable[..., torch.Tensor] = original) -> torch.Tensor:
            called.append(name)
            return original(*args)

        monkeypatch.setattr(convolutions, name, noted)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    grad, x, weight = operands(*shape)
    found = convolution_weight_gradient(grad, x, weight, [1, 1], list(weight.stride()))
    assert called == [way]
    torch.testing.assert_close(found, convolutions._by_onednn(grad, x, weight, [1, 1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_no_images(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    grad, x, weight = operands(0, 64, 64, (20, 20), (3, 3), (1, 1))
    found = convolution_weight_gradient(grad, x, weight, [1, 1], list(weight.stride()))
    torch.testing.assert_close(found, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("grad", "weight", "pay"),
    [
        ((8, 64, 32, 32), (64, 64, 3, 3), True),
        ((8, 128, 15, 15), (64, 128, 3, 3), True),
        ((8, 32, 32, 32), (32, 32, 3, 3), False),  # too little to multiply for what is transformed
        ((2, 512, 4, 4), (512, 512, 3, 3), False),  # 8 tiles: results of 16 places for one sum of 8 numbers
        ((1, 64, 16, 16), (64, 64, 3, 3), False),  # little work
        ((600, 64, 1, 1), (64, 64, 3, 3), True),
        ((600, 64, 1, 2), (64, 64, 3, 3), False),  # half of each tile lies beside the line
        ((600, 64, 2, 1), (64, 64, 3, 3), False),
        ((8, 64, 32, 32), (64, 64, 3, 1), False),
        ((8, 64, 32, 32), (64, 64, 5, 5), False),
    ],
)
def test_where_tiles_pay(grad: tuple[int, ...], weight: tuple[int, ...], pay: bool) -> None:
    assert tiles_pay(grad, weight) == pay


def block(ins: int, outs: int, size: int = 3, **options: Any) -> list[nn.Module]:
    convolution = nn.Conv2d(ins, outs, size, **{"padding": size // 2, **options})
    # smooth: at a kink, rounding alone decides between two gradients
    return [convolution, nn.BatchNorm2d(outs), nn.SiLU()]


def net(*blocks: list[nn.Module]) -> nn.Module:
    """Blocks between one from three channels and a head."""
    torch.manual_seed(0)
    layers = [module for modules in (block(3, 32), *blocks) for module in modules]
    return randomised(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)))


def images(rows: int, size: int = 24) -> Batch:
    torch.manual_seed(1)
    return torch.randn(rows, 3, size, size), torch.randint(0, 5, (rows,))


def lowered(model: nn.Module, size: int = 24, **options: Any) -> cf.Lowered:
    return cf.compile(model, loss_fn=F.cross_entropy, optimizer=sgd(model), **options).lower(*images(4, size))


@pytest.mark.parametrize(
    ("name", "blocks", "found"),
    [
        ("two", [block(32, 48), block(48, 32)], 2),
        ("without a bias", [block(32, 32, bias=False)], 1),
        ("few channels", [block(32, 16), block(16, 32)], 0),
        ("strides", [block(32, 32, stride=2)], 0),
        ("dilated", [block(32, 32, dilation=2, padding=2)], 0),
        ("groups", [block(32, 32, groups=2)], 0),
        ("large kernel", [block(32, 32, 5)], 0),
        ("kernel of a pixel", [block(32, 32, 1)], 0),
    ],
)
def test_which_convolutions(name: str, blocks: list[list[nn.Module]], found: int) -> None:
    assert lowered(net(*blocks)).text().count(NAME) == found


def test_small_maps_that_padding_lets_grow_are_left_alone() -> None:
    assert NAME in lowered(net(block(32, 32))).text()
    assert NAME not in lowered(net(block(32, 32)), size=16).text()


def test_small_maps_are_computed_by_tiles_where_channels_are_many() -> None:
    text = lowered(net(block(32, 64), block(64, 64), block(64, 32)), size=16).text()
    assert text.count(NAME) == 1


def test_a_model_that_lies_channels_last_itself() -> None:
    # the gradient that comes back to the last block is one mean spread out, and lies channels first
    model = net(block(32, 32), block(32, 32)).to(memory_format=torch.channels_last)
    assert lowered(model).text().count(NAME) == 1


def test_a_rank_that_keeps_its_convolutions_whole_communicates_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(block(32, 48), block(48, 32))
    apart = lowered(model, device_num=2)
    monkeypatch.setattr(WeightGradients, "when", lambda situation: WeightGradients(at_least=1000))
    whole = lowered(model, device_num=2)
    assert NAME in apart.text() and NAME not in whole.text()
    assert apart.collectives == whole.collectives


def test_gradients_are_those_of_the_eager_loop() -> None:
    assert_gradients_of_eager(net(block(32, 48), block(48, 32, bias=False)), 2)


def assert_gradients_of_eager(model: nn.Module, found: int) -> None:
    """`found`: how many weight gradients have the op."""
    mine = copy.deepcopy(model)
    step = cf.compile(mine, loss_fn=F.cross_entropy)
    batch = images(4)
    assert step.lower(*batch).text().count(NAME) == found
    loss = step(*batch)
    want = F.cross_entropy(model(batch[0]), batch[1])
    want.backward()
    torch.testing.assert_close(loss, want.detach(), rtol=2e-5, atol=2e-5)
    for (name, have), param in zip(mine.named_parameters(), model.parameters(), strict=True):
        assert have.grad is not None and param.grad is not None
        assert have.grad.stride() == param.grad.stride(), name
        torch.testing.assert_close(have.grad, param.grad, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


class OneForBoth(nn.Conv2d):
    """Gives stride, padding and dilation as one number each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, self.weight, self.bias, [1], [1], [1], False, [0], 1)


@pytest.mark.parametrize(
    ("middle", "found"),
    [
        (partial(nn.Conv2d, 32, 32, 3, padding="valid"), 2),
        (partial(nn.Conv2d, 32, 32, 3, padding="same"), 2),
        (partial(nn.Conv2d, 32, 32, (1, 3), padding="valid"), 2),
        # what it leaves is too small for the other one
        (partial(nn.Conv2d, 32, 32, 3, padding="valid", stride=2), 0),
        (partial(OneForBoth, 32, 32, 3), 2),
    ],
    ids=["valid", "same", "valid, a row", "valid, strides", "torch.convolution"],
)
def test_padding_by_name_or_one_number(
    middle: Callable[[], nn.Module], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert_gradients_of_eager(net([middle()], block(32, 32, bias=False)), found)


def test_the_work_is_that_of_the_backward() -> None:
    def work(model: nn.Module) -> float:
        return sum(flops_and_bytes(node)[0] for node in lowered(model)._program.graph.nodes)

    wide, grouped = work(net(block(32, 32))), work(net(block(32, 32, groups=2)))
    positions = 2.0 * 4 * 24 * 24
    assert wide - grouped == 3 * positions * (32 * 32 * 9) / 2


def test_a_saved_graph_is_read_back_whole() -> None:
    found = lowered(net(block(32, 32)))
    assert canonical_text(from_json(found.to_json())) == found.text()


def build() -> nn.Module:
    """The one in the middle is computed by tiles on processors with AVX2 alone, the others as products."""
    return net(block(32, 64), block(64, 64), block(64, 32))


@pytest.mark.parametrize("options", [{}, ACROSS_STEPS], ids=["in the step", "across steps"])
def test_two_ranks_train_as_one_device_does(options: dict[str, Any]) -> None:
    case = Case("weight gradients", build, lambda rows: images(rows, 24), coupled=True)
    model = case.model(torch.float32)
    batches = case.batches(2, rows=4, dtype=torch.float32)
    want = train_reference(case, model, batches, 2, sgd)
    world = make_world(case, model, 2, sgd, **options)
    assert NAME in world.step.lower(*images(2)).text()
    train_world(world, batches)
    assert_same(world.models, want, 2e-4)
