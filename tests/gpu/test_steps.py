"""Steps on CUDA: models, dtypes, optimizers and options against eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import step_checks
from tests.gpu.device_models import MODELS, RECURRENT, WITH_DROPOUT
from tests.gpu.step_checks import CAPTURABLE, OPTIMIZERS

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ADAMW = OPTIMIZERS["AdamW fused"]

IN_SINGLE = {"ASGD": 1e-8, "Adam capturable": 1e-6}
"""How far eager PyTorch may be from a step in float64: it keeps rates and corrections of these in float32 on CUDA."""


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_dtypes(name: str, dtype: torch.dtype, graph: Any) -> None:
    step_checks.check_step(MODELS[name], CUDA, dtype, ADAMW, cuda_graph=graph)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    step_checks.check_step(MODELS[name], CUDA, torch.float32, ADAMW, amp=torch.bfloat16)


@pytest.mark.parametrize("name", {**OPTIMIZERS, **CAPTURABLE})
def test_optimizers(name: str) -> None:
    optimizer = {**OPTIMIZERS, **CAPTURABLE}[name]
    step_checks.check_step(MODELS["mlp"], CUDA, torch.float64, optimizer, close=IN_SINGLE.get(name))


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_several_calls_that_are_clipped(count: int, dtype: torch.dtype, graph: Any) -> None:
    options = {"accumulate_steps": count, "clip_grad_norm": 0.05, "cuda_graph": graph}
    step_checks.check_step(MODELS["gpt2"], CUDA, dtype, ADAMW, **options)


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_channels_last(amp: torch.dtype | None) -> None:
    step_checks.check_step(MODELS["resnet"], CUDA, torch.float32, ADAMW, amp=amp, channels_last=True)


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_masks_are_those_of_eager_pytorch(name: str, graph: Any) -> None:
    step_checks.check_step(WITH_DROPOUT[name], CUDA, torch.float32, ADAMW, cuda_graph=graph)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_inductor(name: str) -> None:
    step_checks.check_step(MODELS[name], CUDA, torch.float64, ADAMW, close=1e-9, backend="inductor")


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_recurrent_modules(name: str, dtype: torch.dtype) -> None:
    step_checks.check_step(RECURRENT[name], CUDA, dtype, OPTIMIZERS["SGD momentum"], close=_recurrent(dtype))


@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16], ids=str)
def test_recurrent_modules_under_autocast(amp: torch.dtype) -> None:
    """PyTorch hands cuDNN float16 in both cases."""
    step_checks.check_step(RECURRENT["lstm"], CUDA, torch.float32, OPTIMIZERS["SGD momentum"], amp=amp, close=1e-2)


def test_a_recurrent_module_without_cudnn() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        step_checks.check_step(RECURRENT["gru"], CUDA, torch.float64, OPTIMIZERS["SGD momentum"])


def test_dropout_between_the_layers_of_a_recurrent_module() -> None:
    step_checks.check_dropout_between_layers(CUDA)


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
@pytest.mark.parametrize("name", [*MODELS, "lstm"])
def test_no_step_waits_for_the_host(name: str, graph: Any) -> None:
    case = {**MODELS, **RECURRENT}[name]
    step_checks.check_that_no_step_waits_for_the_host(case, CUDA, ADAMW, cuda_graph=graph)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_update_waits_for_the_host(optimizer: str) -> None:
    step_checks.check_that_no_step_waits_for_the_host(MODELS["mlp"], CUDA, OPTIMIZERS[optimizer], cuda_graph=False)


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
def test_no_step_waits_for_a_rate_on_the_device(graph: Any) -> None:
    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(1e-3, device=CUDA), fused=True)

    step_checks.check_that_no_step_waits_for_the_host(MODELS["mlp"], CUDA, adamw, cuda_graph=graph)
    step_checks.check_step(MODELS["mlp"], CUDA, torch.float32, adamw, cuda_graph=graph)


@pytest.mark.parametrize("graph", ["auto", False], ids=lambda graph: f"graph {graph}")
def test_no_compiled_step_waits_for_the_host(graph: Any) -> None:
    options = {"backend": "inductor", "cuda_graph": graph}
    step_checks.check_that_no_step_waits_for_the_host(MODELS["gpt2"], CUDA, ADAMW, torch.float64, **options)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_no_needless_warning_comes(name: str) -> None:
    step_checks.check_that_no_needless_warning_comes({**MODELS, **RECURRENT}[name], CUDA, OPTIMIZERS["SGD"])


def _recurrent(dtype: torch.dtype) -> float:
    """cuDNN may choose another algorithm where weights lie in another order."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 3e-2)
