"""What `capture="dynamo"` and the backend of torch.compile are to their user, on one device."""

from __future__ import annotations

import copy
import gc
import weakref
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.frontends.torch_backend import commfuse
from tests.logs import logged
from tests.models import TwoLayers


class Checkpointed(TwoLayers):
    """Computes again in the backward, with the same dropout."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(checkpoint(self.inner, x, use_reentrant=False))
        return out


class Chosen(Checkpointed):
    """An op that is not traced, in a graph of Dynamo."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cond(x.sum() > 0, lambda x: self.first(x), lambda x: -self.first(x), (x,))
        return super().forward(x) + self.second(h)


class Clipped(TwoLayers):
    """Python looks at a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.norm() > 1:
            h = h / h.norm()
        out: torch.Tensor = self.second(h)
        return out


class Shares(Clipped):
    """Outputs of a graph share memory, among themselves and with an argument, and change in place when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.mean
        left, right = h[:, :4], h[:, 4:]
        torch._dynamo.graph_break()
        left.mul_(3)
        torch._dynamo.graph_break()
        columns, z = h.t(), self.first(x.detach())
        torch._dynamo.graph_break()
        columns[0] = 0
        h *= 2
        out: torch.Tensor = self.second(h + z)  # in a graph that changes its arguments
        torch._dynamo.graph_break()
        self.mean = self.mean * 0.5 + h.detach().mean(0)
        return out * right.sum()


def made(kind: type[nn.Module] = Clipped, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
    torch._dynamo.reset()
    model = kind()
    twin = copy.deepcopy(model)
    return cf.compile(model, capture="dynamo", cpu_kernels=False, **options), model, twin


def trains_as(call: Any, model: nn.Module, twin: nn.Module) -> None:
    for scale in (0.01, 1.0, 1.0):
        x = torch.randn(5, 4) * scale
        for each, run in ((model, call), (twin, twin)):
            each.zero_grad()
            torch.manual_seed(3)
            run(x).square().mean().backward()
        for (name, param), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            torch.testing.assert_close(param.grad, other[1].grad, rtol=0, atol=0, msg=name)


def test_the_plain_form_says_what_to_do() -> None:
    with pytest.raises(cf.CaptureError, match='capture="dynamo"'):
        cf.compile(Clipped())(torch.randn(5, 4))


def test_control_flow_on_values() -> None:
    call, model, twin = made()
    trains_as(call, model, twin)
    assert isinstance(call, cf.CompiledModule) and call.state_dict().keys() == model.state_dict().keys()
    first, *_ = call.graphs
    assert "%first/addmm.0" in first.text() and "(unknown)" not in first.explain().text()
    assert cf.diff(first, first).is_same


def test_views_that_change_when_a_graph_has_ended() -> None:
    call, model, twin = made(Shares)
    trains_as(call, model, twin)
    graphs = len(call.graphs)
    trains_as(call, model, twin)
    assert len(call.graphs) == graphs  # none for a buffer that has been replaced
    assert torch.equal(call.mean, twin.get_buffer("mean"))
    trains_as(*backend(Shares))


def test_modules_of_one_class_share_the_graphs_of_dynamo() -> None:
    call, model, twin = made()
    trains_as(call, model, twin)
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = cf.compile(model, capture="dynamo", cpu_kernels=False)  # in place of the first
        trains_as(again, model, twin)
        other = Clipped()
        trains_as(cf.compile(other, capture="dynamo", cpu_kernels=False), other, twin)
    assert len(again.graphs) == len(call.graphs)


@pytest.mark.parametrize("kind", [Checkpointed, Chosen])
@pytest.mark.parametrize("dynamic", [False, True])
def test_activation_checkpointing_draws_the_same_dropout(kind: type[nn.Module], dynamic: bool) -> None:
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        call, model, twin = made(kind)
        with logged() as messages:
            trains_as(call, model, twin)
    [graph] = call.graphs
    by_autograd = bool(graph.program.by_autograd)
    assert by_autograd == (dynamic or kind is Chosen)
    assert any("run by autograd" in message and "first.weight" in message for message in messages) == by_autograd


def test_it_is_compiled_again_on_request() -> None:
    call, model, twin = made()
    trains_as(call, model, twin)
    call.retrace()
    assert call.graphs == []
    trains_as(call, model, twin)


def test_a_copy_has_graphs_of_its_own() -> None:
    call, model, twin = made()
    trains_as(call, model, twin)
    other = copy.deepcopy(call)
    assert other.graphs == []
    trains_as(other, other.module, copy.deepcopy(twin))
    trains_as(call, model, twin)


def test_gradients_disabled_and_frozen() -> None:
    call, model, twin = made()
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(call(x), twin(x))
    model.requires_grad_(False)
    assert not call(x).requires_grad
    model.requires_grad_(True)
    trains_as(call, model, twin)


def test_a_part_that_has_left_the_model_is_trained_elsewhere() -> None:
    call, model, _ = made()
    x = torch.randn(5, 4)
    call(x).sum().backward()
    first, model.first = model.first, nn.Linear(4, 8, bias=False)
    call(x).sum().backward()
    first.zero_grad()
    first(x).sum().backward()
    assert first.bias.grad is not None and torch.equal(first.bias.grad, torch.full_like(first.bias, 5.0))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss_fn": F.mse_loss}, cf.ConfigValueError, 'capture="dynamo" is an option of the module form'),
        ({"schedule": cf.ScheduleConfig(memory_limit=1 << 30)}, cf.ConfigValueError, "planned one by one"),
        ({"capture": "trace2"}, cf.ConfigValueError, "capture is 'trace2'|capture='trace2'"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cf.compile(Clipped(), **{"capture": "dynamo", **options})


def backend(kind: type[nn.Module] = Clipped, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
    torch._dynamo.reset()
    model = kind()
    return (
        torch.compile(model, backend=commfuse, options={"cpu_kernels": False, **options}),
        model,
        copy.deepcopy(model),
    )


def test_the_backend_of_torch_compile() -> None:
    trains_as(*backend())
    trains_as(*backend(comm_fusion={"allreduce": {"mode": "size", "config": 1}}))


class Numbered(Clipped):
    """Names that differ in a number at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x) * self.w_1 * self.w)
        return out


def test_the_backend_does_not_confuse_names() -> None:
    trains_as(*backend(Numbered))


class Owner(nn.Module):
    """It has a parameter, and a buffer that its graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.scale).sum()


def _tensors_of_a_run() -> tuple[torch.Tensor, list[weakref.ref[torch.Tensor]]]:
    model = Owner()
    loss = torch.compile(model, backend=commfuse)(torch.ones(2, 4))
    return loss, [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]


def test_the_backend_lets_go_of_models_that_are_gone() -> None:
    torch._dynamo.reset()
    found = []
    for _ in range(3):
        loss, references = _tensors_of_a_run()
        loss.backward()
        found.append(references)
        del loss
        gc.collect()
    assert [[each() is not None for each in references] for references in found[:2]] == [[False] * 3] * 2
    torch._dynamo.reset()
    gc.collect()
    assert not any(each() is not None for each in found[2])


def test_a_backward_may_come_after_its_model_is_gone() -> None:
    torch._dynamo.reset()
    first, references = _tensors_of_a_run()
    gc.collect()
    second, _ = _tensors_of_a_run()
    (first + second).backward()
    weight = references[0]()
    assert weight is not None and torch.equal(weight.grad, torch.full((4, 4), 4.0))


def test_torch_finds_the_backend_by_its_name() -> None:
    (found,) = [each for each in entry_points(group="torch_dynamo_backends") if each.name == "commfuse"]
    assert found.load() is commfuse


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"find_unused_parameters": True}, cf.NotAvailableError, 'capture="dynamo", find_unused_parameters'),
        ({"parameter_broadcast": True}, cf.NotAvailableError, "before its first forward"),
        ({"bucket_cap": 3}, cf.ConfigKeyError, "options has 'bucket_cap'|options has \"bucket_cap\""),
        ({"loss_fn": 3}, cf.ConfigKeyError, "not an option here"),
        ({"comm_fusin": {}}, cf.ConfigKeyError, r"not an option here \(did you mean comm_fusion\?\)"),
        ({"comm_fusion": {"allreduce": 3}}, cf.ConfigTypeError, "comm_fusion"),
        ({"parallel_optimizer_config": {"level": 3}}, cf.ConfigValueError, "without enable_parallel_optimizer=True"),
    ],
)
def test_options_that_the_backend_does_not_have(options: dict[str, Any], error: type[Exception], text: str) -> None:
    call, _, _ = backend(**options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"{error.__name__}: .*({text})"):
        call(torch.randn(5, 4))


def test_a_function_under_torch_compile_may_call_a_step() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = cf.compile(models[0], loss_fn=nn.functional.mse_loss, optimizer=optimizers[0])
    calling = torch.compile(lambda x, y: step(x * 2, y).detach() + 1, backend="eager")
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    for _ in range(2):
        loss = nn.functional.mse_loss(models[1](x * 2), y)
        torch.testing.assert_close(calling(x, y), loss.detach() + 1)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()))


def _row_that_learns() -> torch.Tensor:
    return torch.randn(9, 4)[4:].detach().requires_grad_()


class InOneStorage(Clipped):
    """The parameters are parts of one tensor, as an optimizer may lay them out."""

    def __init__(self) -> None:
        super().__init__()
        params = list(self.parameters())
        flat = torch.cat([param.detach().flatten() for param in params])
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.data = part.view_as(param)


class GivesBack(Clipped):
    """An output is a view of an argument."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.flatten()


class ChangesIt(Clipped):
    """Autograd has to know this change of an argument, a part of a tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        torch._dynamo.graph_break()
        h.mul_(2)
        return self.second(h)


@pytest.mark.parametrize("kind", [Clipped, InOneStorage, GivesBack, ChangesIt])
def test_arguments_that_are_parts_of_a_storage(kind: type[nn.Module]) -> None:
    """Torch counts a change of their examples before the graph begins."""
    call, model, twin = made(kind)
    x = _row_that_learns()
    found = []
    for run in (call, twin):
        x.grad = None
        out = run(x)
        sum(each.sum() for each in (out if isinstance(out, tuple) else (out,))).backward()
        found.append(x.grad)
    assert torch.equal(*found)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
    assert bool(call.explain().as_they_are) == (kind is ChangesIt)
