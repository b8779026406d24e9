"""These tests are collected only where there is a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Whoever asks for nothing but these tests learns why none of them runs."""
    folder = Path(__file__).parent
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not torch.cuda.is_available() and all(path.is_relative_to(folder) for path in asked):
        raise pytest.UsageError("tests/gpu needs a CUDA device, and PyTorch sees none here")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of captures, for tests that compare bits."""
    caplog.set_level(logging.INFO, "commfuse_fx.cuda_graphs")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield caplog
    torch.cuda.synchronize()
