"""What users do between steps that run from a CUDA graph, against eager PyTorch and against steps without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import graph_checks
from tests.gpu.step_checks import OPTIMIZERS, has_graphs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CHOICES: list[Any] = [False, "auto", *([True] if has_graphs(CUDA) else [])]
each_choice = pytest.mark.parametrize("graph", CHOICES)
each_optimizer = pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])


@each_choice
@each_optimizer
def test_between_steps(graph: Any, name: str) -> None:
    graph_checks.check_what_users_do_between_steps(CUDA, OPTIMIZERS[name], cuda_graph=graph)


@each_choice
@each_optimizer
def test_one_cycle(graph: Any, name: str) -> None:
    graph_checks.check_one_cycle(CUDA, OPTIMIZERS[name], cuda_graph=graph)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_scheduled_rate_of_float64_acts_without_another_capture(name: str, logged: pytest.LogCaptureFixture) -> None:
    graph_checks.check_scheduled_rate(CUDA, OPTIMIZERS[name])
    assert logged.text.count("captured a step") == 1


@each_choice
def test_gradients_without_optimizer(graph: Any) -> None:
    graph_checks.check_gradients_without_optimizer(CUDA, cuda_graph=graph)


@each_choice
def test_a_loader_that_pins_memory(graph: Any) -> None:
    graph_checks.check_a_loader_that_pins_memory(CUDA, OPTIMIZERS["AdamW"], cuda_graph=graph)


@each_choice
def test_masks_after_a_checkpoint(graph: Any) -> None:
    graph_checks.check_masks_after_a_checkpoint(CUDA, OPTIMIZERS["SGD"], cuda_graph=graph)
