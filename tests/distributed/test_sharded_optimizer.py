"""Optimizers of compiled modules whose state real ranks share: the training of DistributedDataParallel, with their
loops, and what happens when a rank fails."""

from __future__ import annotations

import copy
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import commfuse_fx as cf
from commfuse_fx.runtime.execute.wire import messages
from tests.distributed.harness import Ranks, hurry, run_soon
from tests.odd_rows import WithSpare

pytestmark = pytest.mark.dist

STEPS = 4
SMALL = {"parallel_optimizer_threshold": 0, "pad": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "rows": SMALL,
    "rows that divide": {"parallel_optimizer_threshold": 0},
    "owners": {"parallel_optimizer_threshold": 0, "mode": "broadcast"},
    "apart": SMALL,
    "no sharing": {"parallel_optimizer_threshold": 100},
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "sgd": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * STEPS),
}
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 12, generator=made).double(), torch.randint(0, 13, (6,), generator=made)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


Pair = tuple[nn.Module, Any, torch.optim.Optimizer]


def sharded(name: str, config: dict[str, Any], **options: Any) -> Pair:
    net = WithSpare()
    model = cf.compile(net, cpu_kernels=False, **options)
    cls, given = CLASSES[name]
    return net, model, cf.ShardedOptimizer(model, cls, groups_of(net), parallel_optimizer_config=config, **given)


def with_ddp(name: str) -> Pair:
    net = WithSpare()
    cls, given = CLASSES[name]
    return net, with_unused(net), cls(groups_of(net), **given)


def with_unused(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net, find_unused_parameters=True)


def largest_difference(ours: Pair, theirs: Pair) -> float:
    """Of a parameter or a state."""
    pairs = list(zip(ours[0].parameters(), theirs[0].parameters(), strict=True))
    mine, others = ours[2].state_dict(), theirs[2].state_dict()
    assert mine["param_groups"] == others["param_groups"] and mine["state"].keys() == others["state"].keys()
    pairs += [(mine["state"][i][key], others["state"][i][key]) for i in others["state"] for key in others["state"][i]]
    return max((one - other).abs().max().item() for one, other in pairs)


def a_loop(name: str, pair: Pair, begin: int = 0) -> None:
    """Learning rates that change, clipped gradients, micro-batches, a step with a closure, and unused parameters."""
    net, model, optimizer = pair
    scheduler = SCHEDULERS["sgd" if name == "sgd" else "adamw"](optimizer)
    for number in range(begin, begin + STEPS):
        optimizer.zero_grad()
        if number % 2:
            with model.no_sync():
                F.cross_entropy(model(batch(100 + number)[0], number > 1), batch(100 + number)[1]).backward()
        x, y = batch(number)
        F.cross_entropy(model(x, number > 1), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def beside_ddp(name: str, which: str) -> float:
    options = {"comm_fusion": {"openstate": False}} if which == "apart" else {}
    ours, theirs = sharded(name, CONFIGS[which], **options), with_ddp(name)
    for pair in (ours, theirs):
        a_loop(name, pair)
    return largest_difference(ours, theirs)


def all_beside_ddp(cases: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    return {case: beside_ddp(*case) for case in cases}


CASES = {
    1: [("adamw", "rows")],
    2: [("nadam", "owners"), ("adamw", "apart"), ("sgd", "rows"), ("sgd", "no sharing")],
    3: [("adagrad", "rows"), ("rmsprop", "rows that divide")],
}


@pytest.mark.parametrize("size", CASES)
def test_training_is_that_of_ddp(ranks: Ranks, size: int) -> None:
    for found in ranks.values(all_beside_ddp, CASES[size], size=size):
        assert max(found.values()) < 1e-12, found


def saved_by_rank_0(pair: Pair) -> dict[str, Any]:
    """As a loop with DistributedDataParallel does it, but that all ranks ask for the states of model and optimizer."""
    model, state = pair[0].state_dict(), pair[2].state_dict()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": state}, file)
        found = [file.getvalue()]
    dist.broadcast_object_list(found)
    loaded: dict[str, Any] = torch.load(io.BytesIO(found[0]))
    return loaded


def goes_on(saved: dict[str, Any], pair: Pair) -> Pair:
    pair[0].load_state_dict(saved["model"])
    pair[2].load_state_dict(copy.deepcopy(saved["optimizer"]))
    a_loop("adamw", pair, begin=STEPS)
    return pair


def through_checkpoints() -> dict[str, float]:
    """Differences after a checkpoint, from one optimizer to another."""
    rows, theirs = sharded("adamw", SMALL), with_ddp("adamw")
    for pair in (rows, theirs):
        a_loop("adamw", pair)
    saved = {"sharded": saved_by_rank_0(rows), "ddp": saved_by_rank_0(theirs)}
    want = goes_on(saved["ddp"], with_ddp("adamw"))
    found = {
        "sharded to sharded": goes_on(saved["sharded"], sharded("adamw", CONFIGS["owners"])),
        "sharded to ddp": goes_on(saved["sharded"], with_ddp("adamw")),
        "ddp to sharded": goes_on(saved["ddp"], sharded("adamw", SMALL)),
        "loaded again": goes_on(saved["sharded"], rows),
    }
    return {name: largest_difference(pair, want) for name, pair in found.items()}


def to_and_from_a_step() -> tuple[float, float]:
    """Differences of a step that goes on from a module's state, and of a module that goes on from a step's."""
    net, model, optimizer = sharded("adamw", SMALL)
    other = WithSpare()
    given = torch.optim.AdamW(groups_of(other), lr=0.01)
    step = cf.compile(
        other, loss_fn=F.cross_entropy, optimizer=given, enable_parallel_optimizer=True, parallel_optimizer_config=SMALL
    )
    pairs = [(net, model, optimizer), (other, step, given)]

    def both() -> float:
        x, y = batch(0)
        step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return largest_difference(*pairs)

    both()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    states = copy.deepcopy(optimizer.state_dict())
    net.load_state_dict(other.state_dict())
    given.load_state_dict(states)
    first = both()
    optimizer.load_state_dict(copy.deepcopy(given.state_dict()))
    return first, both()


def test_states_go_from_one_form_to_another(ranks: Ranks) -> None:
    for found in ranks.values(through_checkpoints):
        assert max(found.values()) < 1e-12, found
    for found in ranks.values(to_and_from_a_step):
        assert max(found) < 1e-12


def holds_rows() -> tuple[int, int]:
    """Bytes of optimizer state that this rank has allocated after a step, and of whole states."""
    net = nn.Linear(512, 512, bias=False)
    model = cf.compile(net)
    optimizer = cf.ShardedOptimizer(model, torch.optim.AdamW)
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():
        seen = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        shown = sum(value.untyped_storage().nbytes() for value in seen)
        whole = sum(value.nbytes for value in seen)
    shards = optimizer._session.runners.executors.shards
    assert shards is not None
    held = [value for each in shards._divided for value in each.state.values() if value.ndim]
    return shown + sum(value.untyped_storage().nbytes() for value in held), whole


def scaled() -> float:
    """Of parameters, with a scaler that skips the step in which one rank has an infinity."""
    nets: list[nn.Module] = []
    for made in (sharded("adamw", SMALL), with_ddp("adamw")):
        net, model, optimizer = made
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(STEPS):
            x, y = batch(number)
            optimizer.zero_grad()
            if number == 1 and dist.get_rank() == 1:
                x = x * float("inf")
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
        nets.append(net)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def by_dynamo() -> float:
    """Of a model whose Python code decides by values."""

    class Gated(WithSpare):
        def forward(self, x: torch.Tensor, spares: bool = False) -> torch.Tensor:
            hidden = self.into(x)
            if hidden.norm() > 1e9:
                hidden = hidden * 2
            return self.tied(torch.tanh(self.back(self.odd(torch.tanh(hidden)) * self.scale)))

    nets: list[nn.Module] = []
    for made in (False, True):
        net = Gated()
        model: Any = cf.compile(net, capture="dynamo") if made else with_unused(net)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if made:
            optimizer = cf.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, parallel_optimizer_config=SMALL)
        for number in range(STEPS):
            x, y = batch(number)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        nets.append(net)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def freezes_and_adds(net: nn.Module, model: Any, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """One parameter is frozen and others are added while training, by steps with a closure."""
    for number in range(STEPS):
        if number == 2:
            net.get_submodule("back").requires_grad_(True)
            optimizer.add_param_group({"params": list(net.get_submodule("back").parameters()), "lr": 0.02})
            net.get_submodule("into").requires_grad_(False)
        call = with_unused(net) if model is None else model  # DistributedDataParallel has to be made anew
        x, y = batch(number)

        def closure(call: Any = call, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    return list(net.parameters())


def with_groups_that_change() -> float:
    nets = [WithSpare(), WithSpare()]
    for net in nets:
        net.back.requires_grad_(False)
    params = [[param for param in net.parameters() if param.requires_grad] for net in nets]
    model = cf.compile(nets[0], cpu_kernels=False)
    mine = cf.ShardedOptimizer(model, torch.optim.AdamW, params[0], lr=0.01, parallel_optimizer_config=SMALL)
    found = freezes_and_adds(nets[0], model, mine)
    want = freezes_and_adds(nets[1], None, torch.optim.AdamW(params[1], lr=0.01))
    return max((one - other).abs().max().item() for one, other in zip(found, want, strict=True))


def used_on_one_rank() -> float:
    """Of parameters and states, some of which only rank 1 uses."""
    ours, theirs = sharded("adamw", SMALL, find_unused_parameters=True), with_ddp("adamw")
    for _, model, optimizer in (ours, theirs):
        for number in range(STEPS):
            x, y = batch(number)
            optimizer.zero_grad()
            F.cross_entropy(model(x, dist.get_rank() == 1 and number > 0), y).backward()
            optimizer.step()
    return largest_difference(ours, theirs)


def several() -> dict[str, float]:
    held, whole = holds_rows()
    return {
        "bytes": abs(held - whole / dist.get_world_size()),
        "scaled": scaled(),
        "dynamo": by_dynamo(),
        "groups": with_groups_that_change(),
        "unused": used_on_one_rank(),
    }


def test_other_loops_and_what_a_rank_holds(ranks: Ranks) -> None:
    for found in ranks.values(several):
        assert max(found.values()) < 1e-12, found


def fails(how: str) -> str:
    """What this rank hears when a step of the optimizer goes wrong on it, or on the other one."""
    net, model, optimizer = sharded("adamw", SMALL)
    x, y = batch(0)
    first, rank = net.get_parameter("into.weight"), dist.get_rank()

    def backward() -> None:
        F.cross_entropy(model(x), y).backward()

    try:
        if how == "not reduced":
            with model.no_sync():
                backward()
            optimizer.step()
        elif how == "not reduced on one rank":
            backward()
            optimizer.zero_grad()
            if rank == 1:
                with model.no_sync():
                    backward()
            optimizer.step()
        elif how == "other parameters":
            backward()
            first.grad = first.grad if rank == 0 else None
            optimizer.step()
        elif how == "no gradients":
            backward()
            if rank == 1:
                optimizer.zero_grad()
            optimizer.step()
        elif how == "join":
            with model.join():
                for _ in range(2 + rank):
                    backward()
                    optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def all_fail() -> dict[str, str]:
    hows = ("not reduced", "not reduced on one rank", "other parameters", "no gradients", "join")
    found = {how: fails(how) for how in hows}
    _, model, optimizer = sharded("adamw", SMALL)
    optimizer.step()  # nothing has a gradient
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()  # errors ahead of an update have no consequences
    return found


def test_errors_ahead_of_an_update_are_those_of_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.values(all_fail)
    for found in (one, other):
        assert found["not reduced"].startswith("CommFuseError: .grad of ")
        assert "holds gradients of this rank alone" in found["not reduced"]
        assert found["other parameters"].startswith("PlanMismatchError: ranks 0 and 1 use different parameters")
        assert "rank 1 has no gradient of " in found["other parameters"]
        assert "rank 1 has no gradient of " in found["no gradients"]
        assert "ShardedOptimizer.step() inside of join() is not available yet" in found["join"]
    assert other["not reduced on one rank"].startswith("CommFuseError: .grad of ")
    assert (
        one["not reduced on one rank"].startswith("PeerFailedError")
        and "rank 1: CommFuseError" in one["not reduced on one rank"]
    )


def comes_alone(how: str) -> str:
    _, model, optimizer = sharded("adamw", SMALL)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    hurry(6.0)
    try:
        if how == "step" and dist.get_rank() == 0:
            optimizer.step()
        if how == "state" and dist.get_rank() == 0:
            optimizer.state_dict()
    except cf.CollectiveError as error:
        return str(error)
    return ""


def test_a_rank_that_comes_alone_does_not_wait_for_ever(ranks: Ranks) -> None:
    said, _ = ranks.values(comes_alone, "step")
    assert "no vote has come from rank 1" in said and "Nothing was updated" in said
    said, _ = ranks.values(comes_alone, "state")
    assert "is done by all ranks together" in said


def is_killed_before_it_gathers() -> str:
    _, model, optimizer = sharded("adamw", SMALL)
    for step in range(2):
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        if step == 1 and dist.get_rank() == 1:
            messages.all_gather_single = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
        except cf.CollectiveError as error:
            return str(error)
    return "went on"


def test_a_rank_that_dies_in_an_update_leaves_nobody_waiting(ranks: Ranks) -> None:
    one, other = run_soon(ranks, is_killed_before_it_gathers)
    assert other.died == -signal.SIGKILL
    assert "all_gather failed" in one.value and "load a checkpoint" in one.value


def reads_too_late() -> str:
    _, model, optimizer = sharded("adamw", SMALL)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    dist.destroy_process_group()
    with pytest.raises(cf.CollectiveError) as error:
        optimizer.state_dict()
    return str(error.value)


def test_a_state_is_read_before_the_world_is_closed(ranks: Ranks) -> None:
    for said in ranks.values(reads_too_late):
        assert "read it on all ranks before destroy_process_group()" in said
