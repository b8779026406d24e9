"""A rank of two that train on one device until one of them ends, in one of two ways: `ending_ranks.py DEVICE WAY`."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import commfuse_fx as cf
from benchmarks.two_ranks import join_as_host_of_its_own
from tests.gpu.device_models import MODELS
from tests.gpu.step_checks import OPTIMIZERS

WAYS = ("killed", "raises")
BEFORE = 8
"""Steps before a rank ends: by then they run from a CUDA graph."""


def main(device: torch.device, way: str) -> None:
    join_as_host_of_its_own(timeout=20)
    case = MODELS["mlp"]
    model = case.on(device, torch.float32)
    step = cf.compile(model, optimizer=OPTIMIZERS["AdamW fused"](model.parameters()))
    batches = case.batches(device, torch.float32, 200)
    try:
        for number, batch in enumerate(batches):
            if number == BEFORE and dist.get_rank() == 1:
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise FileNotFoundError("the loader has found no file")
            step(**batch)
    except cf.CommFuseError as error:
        print(f"told: {error}", flush=True)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), sys.argv[2])
