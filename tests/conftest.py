from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import commfuse_fx as cf

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test verifies what it compiles, starts from one seed, and leaves no context behind."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")
    torch.manual_seed(0)
    cf.reset_auto_parallel_context()
    yield
    cf.reset_auto_parallel_context()
