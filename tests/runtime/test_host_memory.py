"""Memory that steps free stays with the process. In processes of their own: malloc's settings hold for all of one."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.memory.host_memory import SETTINGS, give_freed_memory_back
from tests.distributed.harness import Ranks
from tests.distributed.programs import run_and_leave, run_programs

pytestmark = pytest.mark.dist

STEPS, FIRST = 24, 8
"""The heap still grows in some of the first steps, as small objects may come to lie where the next step needs a whole
block, and now and then in a later one. It is the mean of these that counts."""

PAGES = 2 * (16 << 20) // 4096
"""Of the activations: as many at least are freed in each step."""

MMAP_THRESHOLD = -3  # of malloc.h


def counts_faults() -> None:
    """Print how many pages the system hands out in each step."""
    model = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16))
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
    x = torch.randn(1024, 16)  # activations of 16 MiB
    for _ in range(STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(x, x)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def keeps_and_gives_back() -> None:
    for name in SETTINGS:
        os.environ.pop(name, None)
    counts_faults()
    blocks = [torch.ones(16 << 20) for _ in range(4)]
    del blocks[:3]  # the last one stands behind them
    before = resident()
    give_freed_memory_back()
    print(before - resident())


def has_a_setting() -> None:
    """What glibc does with the variable when a program starts."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 131072)
    counts_faults()


def printed(ranks: Ranks, function: Callable[[], None], folder: Path) -> list[int]:
    (ended,) = run_programs(ranks, run_and_leave, function, files=folder, folder=folder, size=1)
    assert ended.code == 0, ended.err
    return list(map(int, ended.out.split()))


def faults(counted: Sequence[int]) -> float:
    return mean(counted[FIRST:])


def test_steps_use_the_memory_of_the_steps_before_until_it_is_given_back(ranks: Ranks, tmp_path: Path) -> None:
    *counted, given_back = printed(ranks, keeps_and_gives_back, tmp_path)
    assert faults(counted) < PAGES / 8
    assert given_back > 3 * (64 << 20) // 4096 * 0.9


def test_settings_of_the_user_stay(ranks: Ranks, tmp_path: Path) -> None:
    assert faults(printed(ranks, has_a_setting, tmp_path)) > PAGES / 2
