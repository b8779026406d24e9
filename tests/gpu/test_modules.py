"""Modules on CUDA: gradients and buffers are those of eager PyTorch, and no half of a step waits for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import step_checks
from tests.gpu.device_models import MODELS, RECURRENT, WITH_DROPOUT

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)

FORMS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "dynamo": {"capture": "dynamo"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", {**MODELS, **RECURRENT})
def test_gradients(name: str, dtype: torch.dtype) -> None:
    step_checks.check_module({**MODELS, **RECURRENT}[name], CUDA, dtype)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_masks(name: str) -> None:
    step_checks.check_module(WITH_DROPOUT[name], CUDA, torch.float64)


@pytest.mark.parametrize(("name", "form"), [("gpt2", "inductor"), ("gpt2", "dynamo"), ("resnet", "dynamo")])
def test_forms(name: str, form: str) -> None:
    step_checks.check_module(MODELS[name], CUDA, torch.float64, **FORMS[form])


@pytest.mark.parametrize("name", ["mlp", "lstm", "gru"])
def test_a_backward_that_runs_twice(name: str) -> None:
    step_checks.check_retained_backward({**MODELS, **RECURRENT}[name], CUDA)


@pytest.mark.parametrize("name", [*MODELS, "lstm"])
def test_no_half_waits_for_the_host(name: str) -> None:
    step_checks.check_that_no_half_waits_for_the_host({**MODELS, **RECURRENT}[name], CUDA)
