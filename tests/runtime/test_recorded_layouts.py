"""Values lie in memory as the graph says, whatever kernels do: autograd and passes have relied on it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import Spec, info, same_layout
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures

TOLERANCE = 2e-5


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def by_channel(norm: nn.Module) -> nn.Module:
    """A norm over the last dimension, applied to channels."""

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return Permuted()


def image_tokens(activation: nn.Module, norm: nn.Module, head: bool = True) -> nn.Module:
    """Patches of an image, as tokens: the gradient that comes back is a transposed one."""
    patches = nn.Conv2d(3, 8, 4, 4)
    return (
        nn.Sequential(patches, norm, activation, Function(tokens), nn.Linear(8, 8))
        if head
        else nn.Sequential(patches, norm, activation)
    )


def last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def weighted_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def loss_of(model: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weighted_sum(model(x), weights)


def batch_of(model: nn.Module, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape)
    with torch.no_grad():
        return x, torch.randn_like(copy.deepcopy(model)(x), memory_format=torch.contiguous_format)


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Each against the largest: some are zero but for rounding."""
    wanted = [param.grad for param in reference.parameters()]
    size = max(grad.abs().max().item() for grad in wanted if grad is not None)
    for (name, param), want in zip(model.named_parameters(), wanted, strict=True):
        assert param.grad is not None and want is not None
        assert (param.grad - want).abs().max().item() <= tolerance * size, name


def assert_learns_as_eager(model: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> cf.CompiledStep:
    """Two steps: the first one finds out how kernels lay out, the second one knows."""
    eager = copy.deepcopy(model)
    step = cf.compile(model, loss_fn=weighted_sum)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        loss = step(x, weights)
        want = loss_of(eager, x, weights)
        want.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, want.detach(), rtol=1e-4, atol=1e-4)
        assert_same_gradients(model, eager)
    return step


def copied(step: cf.CompiledStep) -> list[str]:
    """What the step copies at every run, because kernels lay it out otherwise."""
    assert step.session.running is not None and step.session.running.generated is not None
    return [info(node).name for node in step.session.running.generated.code.handed_on]


def differing(value: Any, spec: Spec) -> bool:
    if isinstance(spec, tuple):
        return any(map(differing, value, spec))
    return spec is not None and not same_layout(spec.shape, value.stride(), spec.stride)


def assert_lies_as_recorded(model: nn.Module, batch: Sequence[torch.Tensor]) -> None:
    """Every value of the graph that runs, views and what is written in place as well."""
    found: list[str] = []

    def observe(node: fx.Node, values: Sequence[Mapping[fx.Node, Any]]) -> None:
        if any(differing(each[node], info(node).spec) for each in values):
            found.append(f"{info(node).name} {info(node).spec}")

    world = LockstepWorld(cf.compile(model, loss_fn=weighted_sum, device_num=2, global_rank=0))
    world([tuple(batch)] * 2, observe=observe)
    assert not found


def assert_right(model: nn.Module, batch: Sequence[torch.Tensor]) -> cf.CompiledStep:
    """Both, of one capture: no model here asks how many ranks there are."""
    learning, lying = copy.deepcopy(model), copy.deepcopy(model)
    for each in (learning, lying):
        captures.share(each, model, any_mesh=True)
    step = assert_learns_as_eager(learning, *batch)
    assert_lies_as_recorded(lying, batch)
    captures.forget(model)
    return step


ACTIVATIONS = {
    each.__name__: each
    for each in (
        nn.ELU, nn.CELU, nn.SELU, nn.Hardswish, nn.Hardsigmoid, nn.ReLU6, nn.Hardtanh, nn.Softplus, nn.Softshrink,
        nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.LeakyReLU, nn.PReLU, nn.Tanh, nn.LogSigmoid,
    )
}  # fmt: skip
NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(4, 8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "batch": lambda: nn.BatchNorm2d(8),
    "layer": lambda: by_channel(nn.LayerNorm(8)),
}


PAIRS = [(a, n) for i, a in enumerate(ACTIVATIONS) for k, n in enumerate(NORMS) if (i + k) % 2 == 0]
"""Every activation behind two norms, every norm before half of the activations."""


@pytest.mark.parametrize(("activation", "norm"), PAIRS)
def test_activations_behind_norms(activation: str, norm: str) -> None:
    for model in (
        image_tokens(ACTIVATIONS[activation](), NORMS[norm]()),
        last(image_tokens(ACTIVATIONS[activation](), NORMS[norm](), head=False)),
    ):
        batch = batch_of(model, (2, 3, 16, 16))
        assert_right(model, batch)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "roll": lambda x: x.roll(1, 2),
    "pow": lambda x: 2**x,
    "copysign": lambda x: torch.copysign(x, x.contiguous()),
    "xlogy": lambda x: torch.xlogy(x, x.sigmoid().contiguous()),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "flip": lambda x: x.flip(3),
    "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x.softmax(1),
    "where": lambda x: torch.where(x > 0, x, x.contiguous()),
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand_as(x) * 1 + x,
    "sort": lambda x: x.sort(1).values,
    "masked_fill_": lambda x: (x * 1).masked_fill_(x.contiguous() > 1, 1.0),
    "index_add_": lambda x: (x * 1).index_add_(1, torch.tensor([0, 1]), x[:, :2].contiguous()),
    "scatter_add_": lambda x: (x * 1).scatter_add_(1, torch.zeros(x.shape, dtype=torch.long), x.contiguous()),
    "pow_": lambda x: (x * 1).pow_(2),
    "transposed_": lambda x: (x * 1).transpose(2, 3).masked_fill_(x.transpose(2, 3) > 1, 1.0).transpose(2, 3),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_between_norms(operation: str) -> None:
    for before in (nn.GroupNorm(4, 8), nn.InstanceNorm2d(8)):
        convolution = nn.Conv2d(1, 8, 3, padding=2, dilation=2)
        model = last(
            nn.Sequential(
                convolution,
                before,
                Function(OPERATIONS[operation]),
                nn.GroupNorm(2, 8),
                Function(tokens),
                nn.Linear(8, 4),
            )
        )
        batch = batch_of(model, (2, 1, 8, 5))
        assert_right(model, batch)


def test_operations_that_channels_last_passes_by() -> None:
    def network(operation: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        first = (nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), Function(operation))
        second = (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))

    for operation in (lambda x: 2**x, lambda x: x.roll(1, 2), lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")):
        model = network(operation)
        batch = batch_of(model, (4, 3, 24, 24))
        assert copied(assert_right(model, batch)) == []


def test_maps_of_one_channel() -> None:
    """Their strides suit contiguous and channels last at once, and kernels take them for the one or the other."""
    parts = (
        nn.Conv2d(3, 1, 3),
        by_channel(nn.LayerNorm(1)),
        nn.Conv2d(1, 1, 3, padding=1),
        nn.Upsample(scale_factor=2),
    )
    model = nn.Sequential(*parts, nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), Function(tokens))
    batch = batch_of(model, (2, 3, 8, 8))
    assert_right(model, batch)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(x)


def test_nothing_is_copied_where_the_record_is_right() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
    shapes = {nn.Sequential(*layers, *pooled): (4, 3, 24, 24), nn.Sequential(Block(), Block()): (2, 6, 16)}
    for model, shape in shapes.items():
        assert copied(assert_learns_as_eager(model, *batch_of(model, shape))) == []


def test_only_what_has_to_be_copied_is() -> None:
    model = image_tokens(nn.Hardswish(), nn.GroupNorm(4, 8))
    step = assert_learns_as_eager(model, *batch_of(model, (2, 3, 16, 16)))
    assert copied(step) == ["2/grad.hardswish_backward.0"]


def test_profiles_are_measured_on_what_is_recorded() -> None:
    """In a view the step would fail."""
    model = image_tokens(nn.ReLU6(), nn.InstanceNorm2d(8))
    step = cf.compile(model, loss_fn=weighted_sum)
    profile = step.profile(*batch_of(model, (2, 3, 16, 16)), rounds=1)
    assert all(math.isfinite(seconds) for seconds in profile.node_seconds.values())
