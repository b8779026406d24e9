"""What all tests share. A plugin of pytest, which `conftest.py` takes up."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.capture.build import capture
from commfuse_fx.capture.joint import capture_joint
from commfuse_fx.passes.declaration import Variants
from commfuse_fx.planning import compile_call
from tests import absent_devices
from tests.distributed.harness import Ranks


def pytest_configure(config: pytest.Config) -> None:
    """Set what every test process has set."""
    # Tests run side by side, ranks too; and a forked child cannot use the threads that its parent computes with.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    # pytest listens to every logger that does not propagate, and torch's structured trace, once somebody listens,
    # takes a stack for every tensor that is described: a third of the time of tracing.
    logging.getLogger("torch.__trace").propagate = True
    absent_devices.leave_unseeded()
    # Hypothesis asks the collector who holds a generator of random numbers, which does not see what is frozen.
    config.addinivalue_line("filterwarnings", "ignore:It looks like `register_random`")


def pytest_collection_finish() -> None:
    """What is imported stays: looking through it in every full collection takes a tenth of the time of all tests."""
    gc.freeze()
    # Graphs are many small objects, of which few live on: by default collecting takes another tenth of the time.
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test verifies what it compiles, starts from one seed, and leaves no context behind."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")
    monkeypatch.setattr(compile_call, "capture", capture)  # until a test shares captures
    monkeypatch.setattr(compile_call, "capture_joint", capture_joint)
    torch.manual_seed(0)
    cf.reset_auto_parallel_context()
    yield
    cf.reset_auto_parallel_context()


@pytest.fixture
def no_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for is what runs, even where another plan would be faster."""
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: Variants())


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """One pool of rank processes per test process."""
    pool = Ranks()
    yield pool
    pool.close()
