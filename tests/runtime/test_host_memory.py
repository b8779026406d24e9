"""Memory that steps free stays with the process. In processes of their own: malloc's settings hold for all of one."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

PROGRAM = """
import resource, torch, commfuse_fx as cf
from torch import nn
from torch.nn import functional as F
model = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16))
step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
x = torch.randn(1024, 16)  # activations of 16 MiB
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    before = faults()
    step(x, x)
    print(faults() - before)
"""

PAGES = 2 * (16 << 20) // 4096
"""Of the activations: as many at least are freed in each step."""


GIVES_BACK = """
from commfuse_fx.runtime.memory.host_memory import give_freed_memory_back
resident = lambda: int(open("/proc/self/statm").read().split()[1])
blocks = [torch.ones(16 << 20) for _ in range(4)]
del blocks[:3]  # the last one stands behind them
before = resident()
give_freed_memory_back()
print(before - resident())
"""


def printed(program: str, **settings: str) -> list[int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**plain, **settings}, capture_output=True, text=True, check=True
    )
    return list(map(int, run.stdout.split()))


def faults(counted: list[int]) -> float:
    """Of a step. The heap may still grow once: most steps count."""
    return median(counted[3:])


def test_steps_use_the_memory_of_the_steps_before_until_it_is_given_back() -> None:
    *counted, given_back = printed(PROGRAM + GIVES_BACK)
    assert faults(counted) < PAGES / 10
    assert given_back > 3 * (64 << 20) // 4096 * 0.9


def test_settings_of_the_user_stay() -> None:
    assert faults(printed(PROGRAM, MALLOC_MMAP_THRESHOLD_="131072")) > PAGES / 2
