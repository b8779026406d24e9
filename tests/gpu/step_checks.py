"""Checks of steps and modules on one device against eager PyTorch. CUDA runs all of them, the CPU a few."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from tests.gpu.device_models import DeviceModel

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-3),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-3),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2, t0=2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
}

CAPTURABLE: dict[str, MakeOptimizer] = {
    "Adam capturable": lambda params: torch.optim.Adam(params, lr=1e-3, capturable=True)
}
"""Optimizers that PyTorch has for CUDA only."""

STEPS = 6
"""Steps of one shape, of which the last ones run from a CUDA graph unless `cuda_graph=False`."""

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far parameters may differ after some steps, as a part of their norm."""


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def assert_near(have: Iterable[torch.Tensor], want: Iterable[torch.Tensor], close: float) -> None:
    mine, other = flat(have), flat(want)
    far = float((mine - other).norm() / other.norm().clamp_min(1e-30))
    assert far <= close, f"differs by {far:.1e} of the norm, which is more than {close:.1e}"


def autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def check_step(
    case: DeviceModel,
    device: torch.device,
    dtype: torch.dtype,
    optimizer: MakeOptimizer,
    amp: torch.dtype | None = None,
    channels_last: bool = False,
    close: float | None = None,
    accumulate_steps: int = 1,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> None:
    """Train a step and an eager model with the same numbers, and compare losses, parameters and buffers."""
    options.update(accumulate_steps=accumulate_steps, clip_grad_norm=clip_grad_norm)
    model = case.on(device, dtype, channels_last)
    twin = copy.deepcopy(model)
    step = cf.compile(model, optimizer=optimizer(model.parameters()), **options)
    theirs = optimizer(twin.parameters())
    tolerance = CLOSE[amp or dtype] if close is None else close
    for number, batch in enumerate(case.batches(device, dtype, STEPS * accumulate_steps)):
        torch.manual_seed(number)
        with autocast(device, amp):
            loss = step(**batch)
        torch.manual_seed(number)
        with autocast(device, amp):
            want = twin(**batch)
        (want / accumulate_steps if accumulate_steps > 1 else want).backward()
        if (number + 1) % accumulate_steps == 0:
            if clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), clip_grad_norm)
            theirs.step()
            theirs.zero_grad()
        assert_near([loss], [want], tolerance)
    assert_near(model.parameters(), twin.parameters(), tolerance)
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()], rtol=tolerance, atol=tolerance)


def check_module(case: DeviceModel, device: torch.device, dtype: torch.dtype, **options: Any) -> None:
    """Compare the gradients and buffers of a compiled module with those of the eager one, `.grad` kept and not."""
    model = case.on(device, dtype)
    twin = copy.deepcopy(model)
    compiled = cf.compile(model, **options)
    for number, batch in enumerate(case.batches(device, dtype, 3)):
        for net, call in ((model, compiled), (twin, twin)):
            net.zero_grad(set_to_none=number % 2 == 0)
            torch.manual_seed(number)
            call(**batch).backward()
        assert_near(gradients(model), gradients(twin), CLOSE[dtype])
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()])


def check_retained_backward(case: DeviceModel, device: torch.device) -> None:
    """A second backward through one forward adds the same gradients."""
    model = case.on(device, torch.float64)
    twin = copy.deepcopy(model)
    batch = case.batches(device, torch.float64, 1)[0]
    for call in (cf.compile(model), twin):
        loss = call(**batch)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_near(gradients(model), gradients(twin), CLOSE[torch.float64])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@contextmanager
def no_host_synchronisation(device: torch.device) -> Iterator[None]:
    """Inside the `with` block an op that makes the host wait for a GPU is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_that_no_step_waits_for_the_host(
    case: DeviceModel,
    device: torch.device,
    optimizer: MakeOptimizer,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    model = case.on(device, dtype)
    step = cf.compile(model, optimizer=optimizer(model.parameters()), **options)
    batches = case.batches(device, dtype, STEPS + 2)
    for batch in batches[:STEPS]:
        step(**batch)
    with no_host_synchronisation(device):
        for batch in batches[STEPS:]:
            step(**batch)


def check_that_no_half_waits_for_the_host(case: DeviceModel, device: torch.device, **options: Any) -> None:
    model = case.on(device, torch.float32)
    compiled = cf.compile(model, **options)
    batches = case.batches(device, torch.float32, 4)
    for batch in batches[:2]:
        compiled(**batch).backward()
    with no_host_synchronisation(device):
        model.zero_grad()
        for batch in batches[2:]:  # the second one adds to `.grad`
            compiled(**batch).backward()


def check_that_no_needless_warning_comes(
    case: DeviceModel, device: torch.device, optimizer: MakeOptimizer, **options: Any
) -> None:
    """PyTorch does not say in a step that SGD without momentum has a first step, how weights should lie, or that traced
    ones lie nowhere."""
    model = case.on(device, torch.float32)
    step = cf.compile(model, optimizer=optimizer(model.parameters()), **options)
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            for batch in case.batches(device, torch.float32, 2):
                step(**batch)
        finally:
            torch.set_warn_always(always)
    said = [str(each.message) for each in seen]
    needless = ("is_first_step", "contiguous chunk of memory", "data pointer of FakeTensor")
    assert not [each for each in said if any(part in each for part in needless)]


def has_graphs(device: torch.device) -> bool:
    """Whether this version captures steps in CUDA graphs."""
    try:
        model = nn.Linear(2, 1, device=device)
        cf.compile(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters()), cuda_graph=True)
    except (cf.NotAvailableError, cf.ConfigValueError):
        return False
    return True


class LayerByLayer(nn.Module):
    """What an LSTM with dropout between its two layers computes, from a module per layer."""

    def __init__(self, whole: nn.LSTM) -> None:
        super().__init__()
        sizes = (whole.input_size, whole.hidden_size)
        self.layers = nn.ModuleList([nn.LSTM(size, whole.hidden_size) for size in sizes])
        self.drop = nn.Dropout(whole.dropout)
        for number, layer in enumerate(self.layers):
            layer.load_state_dict(
                {
                    f"{name}_l0": getattr(whole, f"{name}_l{number}")
                    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                }
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers[1](self.drop(self.layers[0](x)[0]))[0].square().mean()
        return loss


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, 2, dropout=0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x)[0].square().mean()
        return loss


def check_dropout_between_layers(device: torch.device) -> None:
    """Dropout between the layers of an LSTM is PyTorch's: masks are those of dropout between modules."""
    torch.manual_seed(0)
    model = Whole()
    twin = LayerByLayer(model.layer).to(device, torch.float64)
    model.to(device, torch.float64)
    step = cf.compile(model, form="step")
    x = torch.randn(5, 3, 4, dtype=torch.float64, device=device)
    torch.manual_seed(1)
    loss = step(x)
    torch.manual_seed(1)
    want = twin(x)
    want.backward()
    assert_near([loss], [want], 1e-9)
    assert_near(gradients(model), gradients(twin), 1e-9)
