"""A model whose loss is a sum over the elements of its parameters, so that a part of it is a model of the same kind.

That gives a divided step without any pass that divides: the graph is that of a model with the parts' shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.inspect.on_compile import Publisher
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import R, S, local_shape
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from tests import captures
from tests.oracle import cluster

Layouts = Mapping[str, tuple[tuple[str, Any], ...]]

ONE_AXIS: Layouts = {"a": (("tp", S(0)),), "b": (("dp", R), ("tp", S(0, 3))), "d": (("tp", S(1)),)}
TWO_AXES: Layouts = {"a": (("tp", S(0)), ("pp", S(0))), "b": (("pp", S(1)), ("tp", S(0, 3))), "d": (("tp,pp", S(1)),)}

ACROSS: dict[str, Any] = {
    "comm_fusion": {"openstate": False},
    "cluster": cluster("late", 1e-4, 2e7),
    "schedule": cf.ScheduleConfig(across_steps=True),
}
"""Messages take so long here that each runs on into the following step."""

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


class Elementwise(nn.Module):
    """a [8, 6], b [12, 4] in float32, d [3, 8, 2] channels last, and two small ones that are never divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(12, 4, dtype=torch.float32))
        self.c = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.d = nn.Parameter(torch.randn(8, 2, 3, dtype=torch.float64).permute(2, 0, 1))
        self.e = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x.sin() + x  # time in which what the step before has left on the wire can arrive
        scale = x.mean() / 4
        parts = [(param * scale - 1).square().sum() for param in (self.a, self.c, self.d, self.e)]
        other: torch.Tensor = (self.b * scale.float() - 1).square().sum()
        return torch.stack(parts).sum() + other.double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator) + 1


def make_step(
    layouts: Layouts, mesh: tuple[int, ...], optimizer: str = "adamw", virtual: bool = True, **options: Any
) -> cf.CompiledStep:
    """A step on a mesh (dp, tp, ...) that averages gradients over dp, and divides parameters over the other axes."""
    model = Elementwise()
    made = OPTIMIZERS[optimizer](model.parameters())
    world = {"device_num": torch.Size(mesh).numel(), "global_rank": 0} if virtual else {}
    step = cf.compile(model, optimizer=made, mesh=mesh, **world, **options, form="step")
    divide(step, layouts)
    return step


def divide(step: cf.CompiledStep, layouts: Layouts) -> None:
    """Let the step's planner compile for parts from now on."""
    step.planner._compile = _compiler(step, layouts)  # type: ignore[method-assign]


def _compiler(step: cf.CompiledStep, layouts: Layouts) -> Any:
    model, optimizer, mesh = Elementwise(), step.optimizer, step.mesh
    wholes = {name: TensorSpec.of(param) for name, param in model.named_parameters()}
    for name, param in list(model.named_parameters()):
        shape = tuple(param.shape)
        for group, placement in layouts.get(name, ()):
            shape = local_shape(shape, placement, mesh.size(group))
        order = sorted(range(param.ndim), key=param.stride, reverse=True)
        back = [order.index(dim) for dim in range(param.ndim)]
        part = torch.zeros([shape[dim] for dim in order], dtype=param.dtype).permute(back)
        setattr(model, name, nn.Parameter(part))
    captures.share(model, Elementwise)
    assert optimizer is not None
    mine = type(optimizer)(model.parameters(), **_options(optimizer))
    planner = Planner(model, None, mine, step.config, Mesh((mesh.shape[0],), ("dp",)), Publisher(0))

    def compile_parts(call: Call, keep_captured: bool = False, like: Plan | None = None) -> Compiled:
        model.train(step.model.training)
        compiled = Planner._compile(planner, call, keep_captured, like)
        program = compiled.program
        program.mesh, program.batch_axes = mesh, "dp"
        compiled.voted = compiled.voted or ("parts", "parts")  # ranks along tp alone vote as well
        for name, layout in layouts.items():
            program.params[name] = replace(program.params[name], layout=layout, whole=wholes[name])
        return compiled

    return compile_parts


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in optimizer.defaults.items()
        if not (name == "decoupled_weight_decay" and isinstance(optimizer, torch.optim.AdamW))
    }


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    """One step on one device, with the mean of the batches' gradients."""
    optimizer.zero_grad()
    torch.stack([model(x) for x in batches]).mean().backward()
    optimizer.step()


def eager(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Elementwise()
    return model, OPTIMIZERS[optimizer](model.parameters())


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and of the optimizer's state."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{name}": torch.as_tensor(copy.deepcopy(value)) for name, value in state.items()})
    return found


def assert_close(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """The state of an optimizer may have been made in another order."""
    assert sorted(have) == sorted(want)
    for name in want:
        torch.testing.assert_close(
            have[name], want[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
