"""Parameters that one of several real ranks each updates: the training of DistributedDataParallel, and its state."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from commfuse_fx.errors import CollectiveError
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.test_parallel_optimizer import OPTIMAL, STEPS, batch, model

pytestmark = pytest.mark.dist

OWNED: dict[str, Any] = {"parallel_optimizer_threshold": 0, "mode": "broadcast"}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"comm_fusion": {"openstate": False}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"},
    "clipped": {"clip_grad_norm": 0.1},
    "level 2": {"parallel_optimizer_config": {**OWNED, "level": 2}, "comm_fusion": {"openstate": False}},
}


def compiled(net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return cf.compile(
        net, optimizer=optimizer, enable_parallel_optimizer=True,
        **{"loss_fn": F.cross_entropy, "parallel_optimizer_config": OWNED, **options},
    )  # fmt: skip


def beside_ddp(name: str) -> float:
    """The largest difference of a parameter or a state from those of DistributedDataParallel."""
    options = VARIANTS[name]
    net, twin = model(), DistributedDataParallel(model())
    optimizer, eager = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (net, twin))
    step = compiled(net, optimizer, **options)
    for number in range(STEPS):
        x, y = batch(number)
        loss = step(x, y)
        eager.zero_grad()
        want = F.cross_entropy(twin(x), y)
        want.backward()
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(twin.parameters(), options["clip_grad_norm"])
        eager.step()
        torch.testing.assert_close(loss, want.detach())
    pairs = list(zip(net.parameters(), twin.parameters(), strict=True))
    states, others = optimizer.state_dict()["state"], eager.state_dict()["state"]
    pairs += [(states[i][key], others[i][key]) for i in others for key in others[i]]
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_that_of_ddp(ranks: Ranks, name: str, size: int) -> None:
    assert max(ranks.values(beside_ddp, name, size=size)) < 1e-12


def holds() -> tuple[int, int]:
    """Bytes of optimizer state that this rank allocates in its first step, and bytes of all parameters."""
    net = nn.Sequential(*(nn.Linear(size, 64, bias=False) for size in (512, 64, 64, 64, 64, 64)))
    optimizer = torch.optim.AdamW(net.parameters())
    step = compiled(net, optimizer, loss_fn=F.mse_loss)
    step(torch.randn(4, 512), torch.randn(4, 64))
    with torch._C.DisableTorchFunctionSubclass():
        seen = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        shown = sum(value.untyped_storage().nbytes() for value in seen)
    shards = step.session.runners.executors.shards
    held = [value for each in shards._divided for value in each.state.values()]
    mine = shown + sum(value.untyped_storage().nbytes() for value in held if value.ndim)
    return mine, sum(param.nbytes for param in net.parameters())


def test_a_rank_holds_the_states_of_what_it_owns(ranks: Ranks) -> None:
    """The first parameter has more bytes than all others together."""
    found = ranks.values(holds, size=2)
    whole = found[0][1]
    assert [held for held, _ in found] == [2 * 4 * 512 * 64, 2 * (whole - 4 * 512 * 64)]


def goes_on_from_its_state() -> float:
    """The state of owners, taken by a step that divides nothing, by one that divides rows, and by other owners."""
    given: dict[str, Any] = {}
    found: list[list[torch.Tensor]] = []
    for options in (OWNED, None, {"parallel_optimizer_threshold": 0}, {**OWNED, "parallel_optimizer_threshold": 1}):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if options is None:
            step = cf.compile(net, loss_fn=F.cross_entropy, optimizer=optimizer)
        else:
            step = compiled(net, optimizer, parallel_optimizer_config=options)
        if given:
            step.load_state_dict(given)
        else:
            for number in range(STEPS):
                step(*batch(number))
            given = copy.deepcopy(step.state_dict())
        for number in range(STEPS):
            step(*batch(number))
        found.append([param.detach().clone() for param in net.parameters()])
    return max((one - two).abs().max().item() for other in found[1:] for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_another_sharding_goes_on_from_its_state(ranks: Ranks, size: int) -> None:
    assert max(ranks.values(goes_on_from_its_state, size=size)) < 1e-13


def takes_a_state_between_steps() -> float:
    """A step that has run takes a state, and gives it back as it was."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = compiled(net, optimizer)
    for number in range(STEPS):
        step(*batch(number))
    given = copy.deepcopy(step.state_dict())
    for number in range(STEPS):
        step(*batch(number))
    want = [param.detach().clone() for param in net.parameters()]
    step.load_state_dict(given)
    for number in range(STEPS):
        step(*batch(number))
    return max((one.detach() - two).abs().max().item() for one, two in zip(net.parameters(), want, strict=True))


def test_a_step_goes_back_to_a_state(ranks: Ranks) -> None:
    assert max(ranks.values(takes_a_state_between_steps, size=3)) == 0


def is_killed_before_it_broadcasts() -> str:
    net = model()
    step = compiled(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step(*batch(0))
    if dist.get_rank() == 1:
        dist.broadcast = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(*batch(1))
    except CollectiveError as error:
        return str(error)
    return "went on"


def test_an_owner_that_dies_before_its_broadcast_leaves_nobody_waiting(ranks: Ranks) -> None:
    one, other = run_soon(ranks, is_killed_before_it_broadcasts)
    assert other.died == -signal.SIGKILL
    assert "broadcast failed" in one.value and "load a checkpoint" in one.value


def gradients_that_live(level: int) -> list[int]:
    """How many gradients that were sent this rank still has in memory, whenever it sends another one."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    step = compiled(
        net, torch.optim.AdamW(net.parameters()), loss_fn=F.mse_loss, comm_fusion={"openstate": False},
        parallel_optimizer_config={**OWNED, "level": level},
    )  # fmt: skip
    x, sent, found, sends = torch.randn(2, 64), [], [], dist.reduce
    step(x, x)

    def watched(block: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.append(sum(not each.expired() for each in sent))
        sent.append(StorageWeakRef(block.untyped_storage()))
        return sends(block, *args, **options)

    dist.reduce = watched
    try:
        step(x, x)
    finally:
        dist.reduce = sends
    return found


def test_at_level_2_a_gradient_lives_on_with_its_owner_alone(ranks: Ranks) -> None:
    for found in ranks.values(gradients_that_live, 1, size=3):
        assert found == [0, 1, 2, 3, 4, 5]
    for found in ranks.values(gradients_that_live, 2, size=3):  # each rank owns two
        assert len(found) == 6 and max(found) <= 3
