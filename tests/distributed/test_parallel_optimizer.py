"""Updates that real ranks share among them: the training of plain data parallel, and what happens when a rank fails."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from commfuse_fx.errors import CollectiveError
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.runtime.execute.wire import messages
from tests import captures
from tests.distributed.harness import Ranks, hurry, run_soon

pytestmark = pytest.mark.dist

STEPS = 5
SMALL = {"parallel_optimizer_threshold": 0, "pad": True}
OPTIMAL = {kind: {"mode": "optimal", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}
SIZES = {kind: {"mode": "size", "config": 1} for kind in ("allgather", "reducescatter")}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "apart": {"comm_fusion": {"openstate": False}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"},
    "bf16 gradients in their own type": {"gradient_fp32_sync": False},
    "level 2": {},
    "level 3": {},
    "level 3, optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "level 3, across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"},
    "level 3, auto": {"schedule": "auto"},
    "pieces": {"comm_fusion": SIZES},  # of its own: a rank keeps its plans
    "level 3, pieces": {"comm_fusion": SIZES},
}
TINY = StreamBuckets(piece=256, first=48, rows=80)
"""Pieces of a few elements, of one member or several ones or a part of one."""


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(12, 26), nn.Tanh(), nn.Linear(26, 13), nn.Tanh(), nn.Linear(13, 4)).to(dtype)
    captures.share(made, "shared updates", any_mesh=True)
    return made


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 12, generator=made).to(dtype), torch.randint(0, 4, (6,), generator=made)


def beside_ddp(name: str) -> float:
    """The largest difference of a parameter or a state from those of DistributedDataParallel."""
    options = {**SMALL, **({"level": int(name[6])} if name.startswith("level") else {})}
    net, twin = model(), DistributedDataParallel(model())
    optimizer, eager = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (net, twin))
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=optimizer, enable_parallel_optimizer=True,
        parallel_optimizer_config=options, **VARIANTS[name],
    )  # fmt: skip
    for number in range(STEPS):
        x, y = batch(number)
        with patch.object(StreamBuckets, "when", lambda situation: TINY) if "pieces" in name else nullcontext():
            loss = step(x, y)
        eager.zero_grad()
        want = F.cross_entropy(twin(x), y)
        want.backward()
        eager.step()
        torch.testing.assert_close(loss, want.detach())
    sent = [each.pieces for each in step.lower(*batch(0)).explain().collectives]
    assert ("pieces" in name) == (max(sent) > 4), sent
    pairs = list(zip(net.parameters(), twin.parameters(), strict=True))
    states, others = optimizer.state_dict()["state"], eager.state_dict()["state"]
    pairs += [(states[i][key], others[i][key]) for i in others for key in others[i]]
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_that_of_ddp(ranks: Ranks, name: str, size: int) -> None:
    assert max(ranks.values(beside_ddp, name, size=size)) < 1e-12


def by_pairs() -> tuple[float, float, list[tuple[str, int]]]:
    """Differences from DistributedDataParallel, and from plain data parallel that goes on from the state; and what is
    sent."""
    net, other, twin = model(), model(), DistributedDataParallel(model())
    optimizer, eager = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (net, twin))
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=optimizer, enable_parallel_optimizer=True,
        parallel_optimizer_config={**SMALL, "optimizer_weight_shard_size": 2},
    )  # fmt: skip
    for number in range(STEPS):
        x, y = batch(number)
        step(x, y)
        eager.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        eager.step()
    states, others = optimizer.state_dict()["state"], eager.state_dict()["state"]
    pairs = list(zip(net.parameters(), twin.parameters(), strict=True))
    pairs += [(states[i][key], others[i][key]) for i in others for key in others[i]]
    beside = max((one - two).abs().max().item() for one, two in pairs)
    plain = cf.compile(other, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW(other.parameters(), lr=0.01))
    plain.load_state_dict(copy.deepcopy(step.state_dict()))
    step(*batch(STEPS))
    plain(*batch(STEPS))
    on = max((one - two).abs().max().item() for one, two in zip(net.parameters(), other.parameters(), strict=True))
    return beside, on, [(each.kind, len(each.group)) for each in step.lower(*batch(0)).collectives]


def test_pairs_of_ranks_share_updates(ranks: Ranks) -> None:
    for beside, on, sent in ranks.values(by_pairs, size=4):
        assert beside < 1e-12 and on < 1e-13
        assert sorted(sent) == [("all_gather", 2), ("all_reduce", 2), ("reduce_scatter", 2)]


def low_precision() -> list[list[torch.Tensor]]:
    found = []
    for options in ({}, {"enable_parallel_optimizer": True, "parallel_optimizer_config": SMALL}):
        net = model(torch.bfloat16)
        step = cf.compile(
            net, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **options
        )
        for number in range(STEPS):
            step(*batch(number, torch.bfloat16))
        sums = [each for each in step.lower(*batch(0, torch.bfloat16)).collectives if each.phase == "backward"]
        assert sums and all(each.dtype == torch.float32 for each in sums)
        found.append([param.detach().clone() for param in net.parameters()])
    return found


def test_bf16_gradients_are_summed_in_fp32(ranks: Ranks) -> None:
    (plain, divided), other = ranks.values(low_precision)
    assert all(map(torch.equal, divided, other[1]))
    for param, want in zip(divided, plain, strict=True):  # list kernels round the end of a tensor otherwise
        torch.testing.assert_close(param, want, rtol=2**-7, atol=2**-9)


def under_autocast() -> tuple[float, dict[str, set[torch.dtype]]]:
    """The largest difference of a parameter from that of DistributedDataParallel, and the dtypes that are sent."""
    net, twin = model(torch.float32), DistributedDataParallel(model(torch.float32))
    optimizer, eager = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, twin))
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=optimizer, enable_parallel_optimizer=True,
        parallel_optimizer_config={**SMALL, "level": 3},
    )  # fmt: skip
    sent: dict[str, set[torch.dtype]] = {}
    for number in range(STEPS):
        x, y = batch(number, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            step(x, y)
            want = F.cross_entropy(twin(x), y)
            for each in step.lower(x, y).collectives:
                sent.setdefault(each.kind, set()).add(each.dtype)
        eager.zero_grad()
        want.backward()
        eager.step()
    pairs = zip(net.state_dict().values(), twin.module.state_dict().values(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs), sent


def test_float32_masters_and_bf16_compute_under_autocast(ranks: Ranks) -> None:
    for largest, sent in ranks.values(under_autocast):
        assert largest < 1e-6
        assert sent == {"all_gather": {torch.bfloat16}, "reduce_scatter": {torch.float32}}


def holds_rows() -> tuple[int, int]:
    """Bytes of optimizer state that this rank allocates in its first step, divided and whole."""
    found = []
    for options in ({"enable_parallel_optimizer": True}, {}):
        net = nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.AdamW(net.parameters())
        step = cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, **options)
        x = torch.randn(4, 512)
        step(x, x)
        with torch._C.DisableTorchFunctionSubclass():
            seen = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
            shown = sum(value.untyped_storage().nbytes() for value in seen)
        shards = step.session.runners.executors.shards
        held = [] if shards is None else [value for each in shards._divided for value in each.state.values()]
        found.append(shown + sum(value.untyped_storage().nbytes() for value in held if value.ndim))
    return found[0], found[1]


def test_a_rank_holds_the_states_of_its_rows(ranks: Ranks) -> None:
    for size in (2, 4):
        for held, whole in ranks.values(holds_rows, size=size):
            assert whole == 2 * 4 * 512 * 512 and held == whole / size


def goes_on_from_its_state() -> float:
    """The state of a divided step, taken by one that divides nothing, and by one that divides otherwise."""
    given: dict[str, Any] = {}
    found: list[list[torch.Tensor]] = []
    for options in (SMALL, None, {"parallel_optimizer_threshold": 0}):
        net = model()
        divided = {} if options is None else {"enable_parallel_optimizer": True, "parallel_optimizer_config": options}
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        step = cf.compile(net, loss_fn=F.cross_entropy, optimizer=optimizer, **divided)
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


FURTHER: tuple[dict[str, Any], ...] = (
    SMALL, {**SMALL, "level": 3}, {"parallel_optimizer_threshold": 0, "mode": "broadcast"},
)  # fmt: skip


def beside_tensor_parallel(ways: Sequence[dict[str, Any]] = FURTHER) -> list[float]:
    """Differences from one device of parameters and states, and of what goes on from them. Ranks 0 and 1 have one half
    of the batch, ranks 2 and 3 the other, and each of a pair half of both weights."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 26), nn.LayerNorm(26), nn.Linear(26, 13)).double()

    def half(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(2 * step + number)
        x = torch.randn(6, 12, generator=drawn, dtype=torch.float64)
        return x, torch.randint(0, 13, (6,), generator=drawn)

    found = []
    for options in ways:
        net, alone = made(), made()
        cf.shard(net[0], weight=("tp", None))
        cf.shard(net[2], weight=(None, "tp"))
        optimizer, eager = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (net, alone))
        step = cf.compile(
            net, loss_fn=F.cross_entropy, optimizer=optimizer, parallel_mode="semi_auto", mesh=(2, 2),
            enable_parallel_optimizer=True, parallel_optimizer_config=options, clip_grad_norm=0.3,
        )  # fmt: skip
        for number in range(2 * STEPS):
            if number == STEPS:
                step.load_state_dict(copy.deepcopy(step.state_dict()))
            step(*half(number, dist.get_rank() // 2))
            eager.zero_grad()
            x, y = (torch.cat(each) for each in zip(half(number, 0), half(number, 1), strict=True))
            F.cross_entropy(alone(x), y).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
            eager.step()
        kinds = [each.kind for each in step.lower(*half(0, 0)).collectives]
        assert "all_gather" in kinds and ("broadcast" in kinds) == ("mode" in options)
        states, others = optimizer.state_dict()["state"], eager.state_dict()["state"]
        pairs = list(zip(net.parameters(), alone.parameters(), strict=True))
        pairs += [(states[i][key], others[i][key]) for i in others for key in others[i]]
        found.append(max((one - other).abs().max().item() for one, other in pairs))
    return found


def test_divided_parameters_are_divided_further(ranks: Ranks) -> None:
    for found in ranks.values(beside_tensor_parallel, size=4):
        assert max(found) < 1e-12


class Returns(nn.Linear):
    """Its loss, its weight, and a part of that."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return super().forward(x).square().mean(), (self.weight, self.weight[1:])


def returns_parameters() -> None:
    torch.manual_seed(0)
    net = Returns(12, 13)
    step = cf.compile(
        net, form="step", has_aux=True, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        enable_parallel_optimizer=True, parallel_optimizer_config={**SMALL, "level": 3},
    )  # fmt: skip
    for is_training in (True, True, False):
        net.train(is_training)
        want = net.weight.detach().clone()
        _, (weight, part) = step(torch.randn(4, 12))
        assert torch.equal(weight.detach(), want) and torch.equal(part.detach(), want[1:])


def test_a_model_returns_whole_parameters_as_its_forward_has_had_them(ranks: Ranks) -> None:
    ranks.values(returns_parameters)


def reads_on_one_rank() -> str:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=optimizer, enable_parallel_optimizer=True,
        parallel_optimizer_config=SMALL,
    )  # fmt: skip
    step(*batch(0))
    hurry(6.0)
    if dist.get_rank() == 0:
        copy.deepcopy(net.state_dict())  # parameters are whole on every rank
        try:
            copy.deepcopy(optimizer.state_dict())
        except CollectiveError as error:
            return str(error)
    return ""


def test_parameters_are_read_alone_and_states_together(ranks: Ranks) -> None:
    said, _ = ranks.values(reads_on_one_rank)
    assert "is done by all ranks together" in said and "optimizer's state" in said


def is_killed_before_it_gathers() -> str:
    net = model()
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        enable_parallel_optimizer=True, parallel_optimizer_config=SMALL,
    )  # fmt: skip
    step(*batch(0))
    if dist.get_rank() == 1:
        started = messages.all_gather_single

        def die(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return started(*args, **kwargs)

        messages.all_gather_single = die
    try:
        step(*batch(1))
    except CollectiveError as error:
        return str(error)
    return "went on"


def test_a_rank_that_dies_before_rows_are_gathered_leaves_nobody_waiting(ranks: Ranks) -> None:
    one, other = run_soon(ranks, is_killed_before_it_gathers)
    assert other.died == -signal.SIGKILL
    assert "all_gather failed" in one.value and "load a checkpoint" in one.value


def refuses(what: str) -> str:
    net = model()
    given: dict[str, Any] = {
        "module": {},
        "no optimizer": {"loss_fn": F.cross_entropy},
        "opaque": {"loss_fn": F.cross_entropy, "optimizer": Lamb(net.parameters(), lr=0.1)},
    }[what]
    try:
        step = cf.compile(net, enable_parallel_optimizer=True, parallel_optimizer_config=SMALL, **given)
        step(*batch(0))
    except cf.CommFuseError as error:
        return str(error)
    return ""


class Lamb(torch.optim.SGD):
    """Its update mixes the elements of a parameter."""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("module", "update with cf.ShardedOptimizer(model, torch.optim.AdamW, lr=...)"),
        ("no optimizer", "without an optimizer"),
        ("opaque", "enable_parallel_optimizer=True with Lamb: Lamb has no rule in the compiler"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(ranks: Ranks, what: str, message: str) -> None:
    one, other = ranks.values(refuses, what)
    assert one == other and message in one
