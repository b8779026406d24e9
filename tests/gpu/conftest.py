"""These tests are collected only where there is a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of captures, for tests that compare bits."""
    caplog.set_level(logging.INFO, "commfuse_fx.cuda_graphs")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield caplog
    torch.cuda.synchronize()
