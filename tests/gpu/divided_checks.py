"""Checks of the parallel optimizer on two ranks of one device against DistributedDataParallel."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from tests.gpu.device_models import MODELS
from tests.gpu.step_checks import OPTIMIZERS, assert_near

CLOSE = 1e-10


def options_of(**config: Any) -> dict[str, Any]:
    """All parameters are divided whose rows divide."""
    return {
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, **config},
    }


def check_divided(device: torch.device, model: str, optimizer: str, **config: Any) -> None:
    """Parameters and the optimizer's state equal those of DDP, with micro-batches and clipping, and after a load."""
    case, make = MODELS[model], OPTIMIZERS[optimizer]
    net = case.on(device, torch.float64)
    twin, fresh = copy.deepcopy(net), copy.deepcopy(net)
    theirs = DistributedDataParallel(twin, device_ids=[device.index] if device.type == "cuda" else None)
    theirs_optimizer = make(twin.parameters())
    more = {} if config.get("level") == 3 else {"accumulate_steps": 2}
    count = more.get("accumulate_steps", 1)
    shared = {"clip_grad_norm": 0.05, **more, **options_of(**config)}
    mine = make(net.parameters())
    step = cf.compile(net, optimizer=mine, **shared)
    batches = case.batches(device, torch.float64, 4 * count, seed=dist.get_rank())
    folder = [tempfile.mkdtemp() if not dist.get_rank() else ""]
    dist.broadcast_object_list(folder)
    for number, batch in enumerate(batches):
        if number == 2 * count:
            step.save(f"{folder[0]}/last")
            mine = make(fresh.parameters())
            step = cf.compile(fresh, optimizer=mine, **shared)
            step.load(f"{folder[0]}/last")
        loss = step(**batch)
        updates = (number + 1) % count == 0
        with nullcontext() if updates else theirs.no_sync():
            want = theirs(**batch)
            (want / count).backward()
        if updates:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            theirs_optimizer.step()
            theirs_optimizer.zero_grad()
        assert_near([loss], [want], CLOSE)
    step.synchronize()
    assert_near(fresh.parameters(), twin.parameters(), CLOSE)
    states = [each.state_dict()["state"] for each in (mine, theirs_optimizer)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[1].items():
        wanted = {key: value for key, value in state.items() if value.dim()}
        assert_near([states[0][number][key] for key in wanted], wanted.values(), CLOSE)


def check_sharded(device: torch.device, model: str, **config: Any) -> None:
    """The optimizer of a module equals that of DDP, with micro-batches, clipping and a load of its whole state."""
    case = MODELS[model]
    net = case.on(device, torch.float64)
    twin = copy.deepcopy(net)
    theirs = DistributedDataParallel(twin, device_ids=[device.index] if device.type == "cuda" else None)
    ours, options = cf.compile(net), options_of(**config)["parallel_optimizer_config"]
    mine = cf.ShardedOptimizer(ours, torch.optim.AdamW, lr=1e-3, parallel_optimizer_config=options)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    batches = case.batches(device, torch.float64, 8, seed=dist.get_rank())
    for number, batch in enumerate(batches):
        for call, optimizer in ((ours, mine), (theirs, plain)):
            updates = number % 2 == 1
            with nullcontext() if updates else call.no_sync():
                call(**batch).backward()
            if updates:
                nn.utils.clip_grad_norm_(call.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        if number == 3:
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert_near(net.parameters(), twin.parameters(), CLOSE)
    states, wanted = mine.state_dict()["state"], plain.state_dict()["state"]
    assert states.keys() == wanted.keys()
    for number, state in wanted.items():
        assert_near(
            [states[number][key] for key in ("exp_avg", "exp_avg_sq")], [state["exp_avg"], state["exp_avg_sq"]], CLOSE
        )


CASES: dict[str, Callable[[torch.device], None]] = {
    "parallel optimizer, level 1": lambda device: check_divided(device, "gpt2", "AdamW fused", level=1),
    "parallel optimizer, padded": lambda device: check_divided(device, "gpt2", "Adam amsgrad", level=1, pad=True),
    "parallel optimizer, level 2": lambda device: check_divided(device, "llama", "SGD momentum", level=2),
    "parallel optimizer, level 3": lambda device: check_divided(device, "gpt2", "AdamW fused", level=3),
    "parallel optimizer, broadcast": lambda device: check_divided(device, "gpt2", "AdamW foreach", mode="broadcast"),
    "sharded optimizer": lambda device: check_sharded(device, "gpt2", pad=True),
    "sharded optimizer, broadcast": lambda device: check_sharded(device, "llama", mode="broadcast"),
}
