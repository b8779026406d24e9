"""Modules whose parameters real ranks divide among them (level 3): the training of DistributedDataParallel, with its
loops, in a part of the memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.gradients.running_backwards import LOOKED_AT
from tests.distributed.harness import Ranks
from tests.distributed.test_sharded_optimizer import CLASSES as OF_SHARDED
from tests.distributed.test_sharded_optimizer import (
    STEPS,
    Pair,
    a_loop,
    batch,
    goes_on,
    groups_of,
    largest_difference,
    saved_by_rank_0,
    with_unused,
)
from tests.odd_rows import WithSpare

pytestmark = pytest.mark.dist

ROWS = {"level": 3, "parallel_optimizer_threshold": 0, "pad": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "all": ROWS,
    "that divide": {"level": 3, "parallel_optimizer_threshold": 0},
    "from 2.4 KiB on": {"level": 3, "parallel_optimizer_threshold": 2, "pad": True},
    "gradients alone": {**ROWS, "level": 2},
    "none, as all are small": {"level": 3, "parallel_optimizer_threshold": 1000},
}
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    **OF_SHARDED,
}
Tensors = list[torch.Tensor]
Loop = Callable[[nn.Module, Any, Any], Tensors | None]


def divided(config: dict[str, Any] = ROWS, net: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    net = WithSpare() if net is None else net
    options = {"cpu_kernels": False, "parallel_optimizer_config": config, **options}
    return net, cf.compile(net, enable_parallel_optimizer=True, **options)


def sharded(name: str, config: dict[str, Any] = ROWS, **options: Any) -> Pair:
    net, model = divided(config, **options)
    cls, given = CLASSES[name]
    return net, model, cf.ShardedOptimizer(model, cls, groups_of(net), **given)


def as_ddp(name: str) -> Pair:
    net = WithSpare()
    cls, given = CLASSES[name]
    return net, with_unused(net), cls(groups_of(net), **given)


def plain(name: str, **options: Any) -> Pair:
    net = WithSpare()
    cls, given = CLASSES[name]
    return net, cf.compile(net, cpu_kernels=False, **options), cls(groups_of(net), **given)


def differ(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((float((one - other).abs().max()) for one, other in pairs), default=0.0)


def trains_alike(cases: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    found = {}
    for name, which in cases:
        ours, theirs = sharded(name, CONFIGS[which]), as_ddp(name)
        for pair in (ours, theirs):
            a_loop(name, pair)
        found[name, which] = largest_difference(ours, theirs)
    return found


CASES = {
    1: [("adamw", "all")],
    2: [
        ("adamw", "all"),
        ("adam", "that divide"),
        ("sgd", "from 2.4 KiB on"),
        ("adamw", "none, as all are small"),
        ("rmsprop", "gradients alone"),
    ],
    3: [("nadam", "from 2.4 KiB on"), ("sgd", "all"), ("adagrad", "all"), ("adam", "gradients alone")],
}


@pytest.mark.parametrize("size", CASES)
def test_training_is_that_of_ddp(ranks: Ranks, size: int) -> None:
    for found in ranks.values(trains_alike, CASES[size], size=size):
        assert max(found.values()) < 1e-12, found


def loss_of(model: Any, number: int, *args: Any) -> torch.Tensor:
    x, y = batch(number)
    return F.cross_entropy(model(x, *args), y)


def clips(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """By the module's own method, and by that of PyTorch."""
    norms = []
    for number, kind in enumerate((2.0, float("inf"), 1.0, 3.0, 2.0)):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norms.append(clip(0.1, kind) if clip else nn.utils.clip_grad_norm_(net.parameters(), 0.1, kind))
        if number == 4:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05))
            norms += [param.grad.clone() for param in net.parameters() if param.grad is not None]
        optimizer.step()
    return norms


def adds_up(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """Backwards that add to reduced gradients, and to others of this rank alone."""
    for number in range(2):
        loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 2).backward()
    with model.no_sync():
        loss_of(model, 3).backward()
    loss_of(model, 4).backward()
    seen = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    loss_of(model, 5).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    loss_of(model, 6).backward()
    optimizer.step()
    return seen


def handles_gradients(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """Gradients that the loop takes away, replaces and writes."""
    first, second, *_ = params = [param for param in net.parameters() if param.requires_grad and param.ndim == 2]
    loss_of(model, 0).backward()
    first.grad = None
    second.grad = torch.ones_like(second)
    params[2].grad.mul_(2)
    optimizer.step()
    held = params[2].grad
    optimizer.zero_grad()
    seen = [held.clone()]
    second.grad = torch.full_like(second, float(dist.get_rank()))
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return seen


def has_several_forwards(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    optimizer.zero_grad()
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model, 2)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    params = [param for param in net.parameters() if param.requires_grad][:4]
    with model.no_sync():
        seen = list(torch.autograd.grad(loss_of(model, 3), params))
    loss_of(model, 4).backward()
    optimizer.step()
    return seen


def evaluates(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """Between steps, and looks at parameters, copies the model and writes to it."""
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad() if number else torch.inference_mode():
            seen.append(loss_of(model, number))
            seen.append(model(batch(number)[0][: 3 + dist.get_rank()]).clone())
        model.train()
        if number == 1:
            seen += [value.clone() for value in copy.deepcopy(net).state_dict().values()]
            with torch.no_grad():
                for param in net.parameters():
                    param.mul_(0.9)
    return seen


def scales(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """With a scaler that skips the step in which one rank has an infinity."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number in range(STEPS):
        x, y = batch(number)
        optimizer.zero_grad()
        if number == 1 and dist.get_rank() == dist.get_world_size() - 1:
            x = x * float("inf")
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [torch.tensor(scaler.get_scale())]


def penalizes(net: nn.Module, model: Any, optimizer: Any) -> None:
    """With gradients that do not come from the module, in most steps."""
    for number in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        if number != 1:
            held = [net.get_parameter(name) for name in ("into.weight", "odd.bias", "scale")]
            loss = loss + sum(param.square().sum() for param in held)
        loss.backward()
        optimizer.step()


def penalizes_late(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """Such gradients come when nobody has looked out for them for long: autograd adds to those of the module."""
    for number in range(LOOKED_AT + 2):
        optimizer.zero_grad()
        loss_of(model, number % 3).backward()
    optimizer.zero_grad()
    (loss_of(model, 0) + net.get_parameter("back.weight").square().sum()).backward()
    optimizer.step()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]


def freezes(net: nn.Module, model: Any, optimizer: Any) -> None:
    for number in range(3):
        net.get_submodule("back").requires_grad_(number != 1)
        call = with_unused(net) if isinstance(model, nn.parallel.DistributedDataParallel) else model
        optimizer.zero_grad()
        loss_of(call, number).backward()
        optimizer.step()


LOOPS = (
    clips,
    adds_up,
    handles_gradients,
    has_several_forwards,
    evaluates,
    scales,
    penalizes,
    penalizes_late,
    freezes,
)
NOT_OF_DDP = (has_several_forwards,)
"""DistributedDataParallel reduces in one backward of each forward."""


def loops_alike() -> dict[str, float]:
    found = {}
    for loop in LOOPS:
        theirs = plain("adamw") if loop in NOT_OF_DDP else as_ddp("adamw")
        wanted = loop(*theirs) or []
        for which in ("all", "gradients alone"):
            ours = sharded("adamw", CONFIGS[which])
            seen = loop(*ours) or []
            found[f"{loop.__name__}, {which}"] = max(differ(seen, wanted), largest_difference(ours, theirs))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_other_loops_are_those_of_ddp(ranks: Ranks, size: int) -> None:
    for found in ranks.values(loops_alike, size=size):
        assert max(found.values()) < 1e-12, found


def of_torch(net: nn.Module, model: Any, optimizer: Any) -> None:
    """With optimizers of torch.optim, also one that mixes the elements of a parameter."""
    others = [torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adafactor(net.parameters(), lr=0.1)]
    for number in range(4):
        for each in others:
            each.zero_grad()
        loss_of(model, number).backward()
        others[number % 2].step()


def has_hooks(net: nn.Module, model: Any, optimizer: Any) -> Tensors:
    """That read gradients in the backward, and one that is part of the graph."""
    seen: Tensors = []
    weight = net.get_parameter("into.weight")
    late = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    early = net.get_parameter("back.weight").register_hook(lambda grad: grad * 2)
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    late.remove()
    early.remove()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    return seen


def computes_again(net: nn.Module, model: Any, optimizer: Any) -> None:
    """With activation checkpointing around the module, and batches of other sizes."""
    for number in range(4):
        optimizer.zero_grad()
        x, y = batch(number)
        x, y = (x, y) if number < 2 else (x[:-2], y[:-2])
        F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=False), y).backward()
        optimizer.step()


def sums(net: nn.Module, model: Any, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(2):
            loss_of(model, number).backward()
        optimizer.step()


def with_several_optimizers(level: int) -> float:
    """Two that are sharded and one of torch.optim, for some parameters each, in both orders."""
    nets: list[nn.Module] = []
    for is_ours in (True, False):
        net = WithSpare()
        model: Any = divided({**ROWS, "level": level}, net)[1] if is_ours else with_unused(net)
        params = [param for param in net.parameters() if param.requires_grad]
        made = []
        for number, (cls, options) in enumerate([*CLASSES.values()][:2]):
            mine = params[number::3]
            made.append(cf.ShardedOptimizer(model, cls, mine, **options) if is_ours else cls(mine, **options))
        made.append(torch.optim.Adagrad(params[2::3], lr=0.1))
        for number in range(4):
            for each in made:
                each.zero_grad()
            loss_of(model, number).backward()
            for each in made if number % 2 else reversed(made):
                each.step()
        nets.append(net)
    return differ(*(net.parameters() for net in nets))


def under_autocast() -> None:
    """Compute in bf16 with float32 parameters: ranks cast their rows, gather bf16, and sum gradients in float32."""
    nets: list[nn.Module] = []
    for is_ours in (True, False):
        net = WithSpare().float()
        model: Any = divided(net=net)[1] if is_ours else cf.compile(net, cpu_kernels=False)
        cls, options = CLASSES["sgd"]
        optimizer = cf.ShardedOptimizer(model, cls, **options) if is_ours else cls(net.parameters(), **options)
        for number in range(3):
            optimizer.zero_grad()
            x, y = batch(number)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            optimizer.step()
        nets.append(net)
        if is_ours:
            with torch.autocast("cpu", torch.bfloat16):
                sent = {(each.kind, each.dtype) for each in model.lower(x.float()).collectives}
            assert ("all_gather", torch.bfloat16) in sent and ("reduce_scatter", torch.bfloat16) not in sent
    assert (found := differ(*(net.parameters() for net in nets))) < 1e-6, found


def with_parameters_of_each_rank() -> float:
    """In hybrid_parallel: the gradients that all ranks have of such a parameter count in the norm."""

    def made() -> WithSpare:
        net = WithSpare()
        net.back.weight.layerwise_parallel = True
        return net

    want = made()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(want, number).backward()
        square = want.back.weight.grad.square().sum()
        for param in want.parameters():
            if param.grad is not None and param is not want.back.weight:
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size())
        dist.all_reduce(square)
        square += sum(
            param.grad.square().sum()
            for param in want.parameters()
            if param.grad is not None and param is not want.back.weight
        )
        for param in want.parameters():
            if param.grad is not None:
                param.grad.mul_(0.1 / (square.sqrt() + 1e-6))
        optimizer.step()
    found = 0.0
    for config in (None, CONFIGS["gradients alone"], ROWS):
        net = made()
        options: dict[str, Any] = {"parallel_mode": "hybrid_parallel", "cpu_kernels": False}
        model = cf.compile(net, **options) if config is None else divided(config, net, **options)[1]
        mine = cf.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for number in range(3):
            mine.zero_grad()
            loss_of(model, number).backward()
            model.clip_grad_norm_(0.1)
            mine.step()
        found = max(found, differ(net.parameters(), want.parameters()))
    return found


def more_loops_alike() -> dict[str, float]:
    found = {}
    for loop in (of_torch, has_hooks, computes_again):
        ours, theirs = sharded("adamw"), plain("adamw")
        seen = [loop(*pair) or [] for pair in (ours, theirs)]
        found[loop.__name__] = max(differ(*seen), largest_difference(ours, theirs))
    options: dict[str, dict[str, Any]] = {"sums": {"gradients_mean": False}, "all": {"find_unused_parameters": True}}
    for name, option in options.items():
        ours, theirs = sharded("adamw", **option), plain("adamw", **option)
        for pair in (ours, theirs):
            sums(*pair) if name == "sums" else a_loop("adamw", pair)
        found[name] = largest_difference(ours, theirs)
    under_autocast()
    found["of each rank"] = with_parameters_of_each_rank()
    found["saved"] = through_checkpoints()
    found |= {f"several optimizers, level {level}": with_several_optimizers(level) for level in (2, 3)}
    return found


def through_checkpoints() -> float:
    """Differences after a checkpoint, from one optimizer to another."""
    ours, theirs = sharded("adamw"), as_ddp("adamw")
    for pair in (ours, theirs):
        a_loop("adamw", pair)
    saved = saved_by_rank_0(ours), saved_by_rank_0(theirs)
    want = goes_on(saved[1], as_ddp("adamw"))
    found = [goes_on(saved[0], as_ddp("adamw")), goes_on(saved[1], sharded("adamw")), goes_on(saved[0], ours)]
    return max(largest_difference(pair, want) for pair in found)


def test_more_loops_are_those_of_a_module_that_is_whole(ranks: Ranks) -> None:
    for found in ranks.values(more_loops_alike):
        assert max(found.values()) < 1e-12, found


def in_pairs() -> float:
    """Of four ranks, two share the rows, and the others have the same ones."""
    ours = sharded("adamw", {**ROWS, "optimizer_weight_shard_size": 2})
    theirs = as_ddp("adamw")
    seen = [clips(*pair) for pair in (ours, theirs)]
    a_loop("adamw", ours), a_loop("adamw", theirs)
    (found,) = trains_alike([("rmsprop", "all")]).values()
    return max(differ(*seen), largest_difference(ours, theirs), found)


def test_rows_are_shared_among_some_of_the_ranks(ranks: Ranks) -> None:
    for found in ranks.values(in_pairs, size=4):
        assert found < 1e-12
