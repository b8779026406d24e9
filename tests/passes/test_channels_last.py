"""Activations of convolutions lie channels last inside of a step, and nowhere outside."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import TensorSpec, info, spec_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.declaration import Situation
from commfuse_fx.passes.kernels import channels_last
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.passes.rewrite.simplify import Simplify
from tests.models import Batch, Case, randomised
from tests.oracle import (
    ACROSS_STEPS,
    assert_same,
    assert_same_tensors,
    collectives,
    make_world,
    sgd,
    tensors_of,
    train_reference,
    train_world,
)

TOLERANCE = 2e-5
LAST = "memory_format=channels_last"
BY_SIZE = {"allreduce": {"mode": "size", "config": 1}}


def layer(inputs: int, outputs: int, size: int = 3, **options: Any) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, padding=size // 2, **options), nn.BatchNorm2d(outputs), nn.ReLU()]


class Viewed(nn.Module):
    """Reads the memory of what a convolution makes in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*layer(3, 8), *layer(8, 8), *layer(8, 8)[:2])
        self.head = nn.Linear(8 * 144, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.head(x.view(x.shape[0], -1))


class Strided(Viewed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.head(x.as_strided((x.shape[0], 8 * 144), (8 * 144, 1)))


class Residual(nn.Module):
    """Branches that are added, a depthwise convolution, a plain tensor that is added, and pooling of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*layer(3, 16))
        self.deep = nn.Sequential(*layer(16, 16, groups=16), *layer(16, 16, 1), nn.Hardswish(), nn.ReLU6())
        self.place = nn.Parameter(torch.randn(1, 16, 12, 12) / 4)
        self.short = nn.Conv2d(16, 16, 1, bias=False)
        self.last = nn.Sequential(*layer(16, 16), nn.AvgPool2d(2), *layer(16, 16), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = F.leaky_relu(self.deep(x) + self.short(x) + self.place)
        return self.head(self.last(F.max_pool2d(x, 2)).flatten(1))


class UNet(nn.Module):
    """Goes down and up again, with transposed convolution, interpolation and cat."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*layer(3, 16), *layer(16, 16))
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), *layer(16, 16))
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.side = nn.Conv2d(16, 8, 1)
        self.out = nn.Sequential(*layer(32, 16), nn.Conv2d(16, 5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        low = self.deep(F.max_pool2d(high, 2))
        wide = F.interpolate(self.side(low), scale_factor=2.0, mode="bilinear")
        return self.out(torch.cat([self.up(low), high, wide], 1)).mean((2, 3))


class Permuted(nn.Module):
    """Blocks like those of ConvNeXt: a norm and linear layers over the channels, which stand last there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*layer(3, 16), *layer(16, 16))
        self.mix = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.norm = nn.LayerNorm(16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.narrow(F.gelu(self.wide(self.norm(self.mix(x).permute(0, 2, 3, 1)))))
        return self.head((x + (self.scale * y).permute(0, 3, 1, 2)).mean((2, 3)))


class Dropped(nn.Module):
    """Random numbers are drawn for whole maps and for single elements."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *layer(3, 16), nn.Dropout2d(0.2), *layer(16, 16), *layer(16, 16), nn.Dropout(0.1), *layer(16, 16)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.head((x * torch.rand_like(x)).mean((2, 3)))


class Narrowing(nn.Module):
    """The last convolutions have more weight than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*layer(3, 16), *layer(16, 16), *layer(16, 16), nn.MaxPool2d(4))
        self.last = nn.Sequential(*layer(16, 64), *layer(64, 64))
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.first(x)).mean((2, 3)))


def images(rows: int) -> Batch:
    return torch.randn(rows, 3, 12, 12), torch.randint(5, (rows,))


NETS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (Viewed, Strided, Residual, UNet, Permuted, Dropped, Narrowing)
}
each_net = pytest.mark.parametrize("net", NETS)


def case(net: str) -> Case:
    return Case(net, NETS[net], images, coupled=True)


def build(net: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return randomised(NETS[net]()).to(dtype)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass counts no bytes."""

    def when(situation: Situation) -> ChannelsLast | None:
        return ChannelsLast(at_most=math.inf) if torch.backends.mkldnn.is_available() else None

    monkeypatch.setattr(ChannelsLast, "when", when)


def compile_net(model: nn.Module, **options: Any) -> cf.CompiledStep:
    return cf.compile(model, **{"loss_fn": F.cross_entropy, **options}, form="step")


def lowered(model: nn.Module, rows: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> cf.Lowered:
    x, target = images(rows)
    return compile_net(model, optimizer=sgd(model), **options).lower(x.to(dtype), target)


def captured(model: nn.Module) -> Program:
    program = lowered(model).captured
    assert program is not None
    Simplify()(program)
    return program


def train(model: nn.Module, step: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The losses of three steps without an optimizer, and the gradients that pile up."""
    torch.manual_seed(2)
    losses = [step(*images(8)).detach() for _ in range(3)]
    return losses, tensors_of(model, gradients=True)


def eager_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        return loss

    return step


def layout(tensor: torch.Tensor) -> list[int]:
    """Strides, but for dimensions of size 1: those of a 1x1 weight can be anything."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.usefixtures("always")
@each_net
def test_gradients_are_those_of_the_eager_loop_and_laid_out_alike(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(net)
    mine = copy.deepcopy(model)
    step = compile_net(mine)
    assert LAST in step.lower(*images(8)).text()
    losses, have = train(mine, step)
    if net == "Dropped":  # a compiled step draws other numbers than the eager loop
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        plain = compile_net(model)
        assert LAST not in plain.lower(*images(8)).text()
        want_losses, want = train(model, plain)
    else:
        want_losses, want = train(model, eager_step(model))
    torch.testing.assert_close(losses, want_losses, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_tensors(have, want, TOLERANCE)
    assert {name: layout(grad) for name, grad in have.items()} == {name: layout(grad) for name, grad in want.items()}
    assert_same_tensors(tensors_of(mine), tensors_of(model), TOLERANCE)


@pytest.mark.parametrize("net", ["Viewed", "Residual", "UNet"])
def test_parameters_after_three_steps_are_those_of_the_eager_loop(net: str) -> None:
    model = build(net)
    mine = copy.deepcopy(model)
    optimizer = sgd(model)
    train(mine, compile_net(mine, optimizer=sgd(mine)))

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = eager_step(model)(x, target)
        optimizer.step()
        return loss

    train(model, step)
    assert_same_tensors(tensors_of(mine), tensors_of(model), 5 * TOLERANCE)
    assert all(param.is_contiguous() for param in mine.parameters())


@pytest.mark.usefixtures("always")
@each_net
def test_every_value_is_laid_out_as_its_metadata_says(net: str) -> None:
    program = captured(build(net))
    assert ChannelsLast(at_most=math.inf)(program)
    verify(program, after="channels_last")
    assert any(" aten.clone(" in line and LAST in line for line in canonical_text(program).splitlines())
    differing = [
        f"{info(node).name}: {value.stride()} is not {spec}"
        for node, value, spec in run(program)
        if layout(value) != layout(torch.empty_strided(spec.shape, spec.stride))
    ]
    assert differing == []


def run(program: Program) -> Iterator[tuple[fx.Node, torch.Tensor, TensorSpec]]:
    """Compute the graph on random inputs: each node that yields a tensor, what it yields, and what it should be."""
    torch.manual_seed(3)
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = info(node).spec
            assert isinstance(spec, TensorSpec)
            drawn = torch.rand(spec.shape) + 0.5 if spec.dtype.is_floating_point else torch.ones(spec.shape)
            values[node] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(drawn)
        elif node.op == "call_function":
            values[node] = node.target(
                *fx.node.map_arg(node.args, values.get), **fx.node.map_arg(node.kwargs, values.get)
            )
            if isinstance(values[node], torch.Tensor):
                spec = info(node).spec
                assert isinstance(spec, TensorSpec)
                yield node, values[node], spec


def test_convolutions_with_large_weights_stay_as_they_are() -> None:
    text = lowered(build("Narrowing")).text()
    convolutions = [line for line in text.splitlines() if "= aten.convolution(" in line]
    assert ["(2304,1,192,16)" in line for line in convolutions] == [True, True, True, False, False]
    assert "/contiguous_format" in convolutions[3]


def test_copies_that_would_cost_more_than_they_spare_are_not_made() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 5))
    found = lowered(model)
    assert LAST not in found.text()
    assert any(note.topic == "not channels last" for note in found.explain().notes)
    program = captured(model)
    assert not ChannelsLast()(program)
    assert ChannelsLast(at_most=10)(program)


def test_the_gradient_of_a_mean_over_maps_is_broadcast_not_copied() -> None:
    model = nn.Sequential(*layer(3, 8), *layer(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    lines = lowered(model).text().splitlines()
    assert [line for line in lines if line.startswith("bwd") and LAST in line] == []
    (broadcast,) = (line for line in lines if "aten.expand(" in line)
    assert ": f32[8,8,12,12](8,1,0,0) = " in broadcast
    name = broadcast.split()[1].rstrip(":")
    (user,) = (line for line in lines if f"({name}, " in line)
    assert "aten.threshold_backward.grad_input(" in user
    assert "(1152,1,96,8) = " in user


def test_explain_says_what_was_copied_for_what() -> None:
    notes = [note for note in lowered(build("Residual")).explain().notes if note.topic == "channels last"]
    assert [note.subject for note in notes] == ["activations of 5 convolution(s)"]
    assert "copies of" in notes[0].reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: lowered(build("Residual", torch.float64), dtype=torch.float64),
        lambda: compile_net(build("Residual").eval()).lower(*images(8)),
        lambda: lowered(build("Residual").to(memory_format=torch.channels_last)),
        lambda: lowered(build("Residual"), parallel_mode="semi_auto", device_num=2, mesh=(2, 1)),
        lambda: lowered(nn.Sequential(nn.Flatten(), nn.Linear(432, 5))),
    ],
    ids=["float64", "evaluation", "weights channels last", "divided", "no convolution"],
)
def test_nothing_happens_where_it_does_not_apply(make: Callable[[], cf.Lowered]) -> None:
    text = make().text()
    assert LAST not in text


@pytest.mark.parametrize(
    "net,options",
    [("Viewed", {}), ("Residual", ACROSS_STEPS), ("UNet", {}), ("Permuted", ACROSS_STEPS), ("Narrowing", {})],
)
def test_two_ranks_train_as_two_devices_with_averaged_gradients(net: str, options: dict[str, Any]) -> None:
    model = build(net)
    batches = case(net).batches(3, rows=16, dtype=torch.float32)
    world = make_world(case(net), copy.deepcopy(model), 2, sgd, **options)
    assert LAST in world.step.lower(*images(8)).text()
    want = train_reference(case(net), model, batches, 2, sgd)
    assert_same(train_world(world, batches), want, 5 * TOLERANCE)


@pytest.mark.parametrize("net", ["Residual", "UNet"])
def test_fusion_does_not_change_a_bit(net: str) -> None:
    batches = case(net).batches(2, rows=16, dtype=torch.float32)
    worlds = [make_world(case(net), build(net), 2, None, fusion) for fusion in (None, {"openstate": False}, BY_SIZE)]
    assert len({len(collectives(world, batches[0])) for world in worlds}) > 1
    first, *others = [train_world(world, batches) for world in worlds]
    for other in others:
        assert_same(other, first, 0, gradients=True)


def test_ranks_that_decide_otherwise_communicate_alike() -> None:
    """A rank with a smaller batch has more weight per activation."""
    model = build("Narrowing")
    found = [lowered(model, rows, device_num=2) for rows in (64, 8, 1)]
    assert len({note for each in found for note in each.explain().notes if "channels last" in note.topic}) == 3
    assert found[0].collectives == found[1].collectives == found[2].collectives


@pytest.mark.parametrize("net", ["Viewed", "UNet"])
def test_a_saved_graph_is_read_back_whole(net: str) -> None:
    found = lowered(build(net), device_num=2)
    saved = from_json(found.to_json())
    assert canonical_text(saved) == found.text() and LAST in found.text()
    assert to_json(saved) == found.to_json()
    assert saved.notes == found.program.notes


def pointwise_calls() -> Iterator[tuple[Any, list[Any]]]:
    """Every pointwise op of tensors and numbers, called with maps that lie channels last."""
    aten = torch.ops.aten
    maps = torch.rand(2, 8, 6, 5).mul(0.8).add(0.1).contiguous(memory_format=torch.channels_last)
    plain = {"number": 0.5, "float": 0.5, "int": 1, "bool": False, "Tensor": maps}
    names = {
        full.split("::")[1].split(".")[0] for full in torch._C._dispatch_get_all_op_names() if full.startswith("aten::")
    }
    for name in sorted(names):  # dir(aten) has only what something in this process has called
        packet = getattr(aten, name, None)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            required = [each for each in op._schema.arguments if not each.kwarg_only and not each.has_default_value()]
            kinds = [str(each.type) for each in required]
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and "Tensor" in kinds:
                if all(kind in plain for kind in kinds) and all(
                    str(each.type) == "Tensor" for each in op._schema.returns
                ):
                    yield op, [plain[kind] for kind in kinds]


def test_pointwise_ops_that_follow_lie_as_tensors_without_data_say() -> None:
    compared = 0
    for op, args in pointwise_calls():
        with suppress(RuntimeError):  # not for these types
            real = op(*args)
            with FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args))
            assert spec_of(real) == spec_of(fake) or op in channels_last._NOT_FOLLOWING, op
            compared += 1
    assert compared > 100
