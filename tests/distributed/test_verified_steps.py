"""Steps of several ranks that verify themselves: in the zoo nothing differs, and damage on one rank is seen on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.ir.core.collectives import c10d, is_start, wait_of
from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.runtime.execute.wire import messages
from tests.distributed import test_accumulation_on_ranks as accumulation
from tests.distributed import test_owned_parameters as owned
from tests.distributed import test_parallel_optimizer as divided_updates
from tests.distributed import test_parity as parity
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import adamw, assert_same, xy
from tests.verifying import broken, damaged_after_snapshot, flip_high_bit, verified


def square(width: int = 16) -> nn.Sequential:
    """Its first layers have the same shapes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(width, 4))


def compiled(net: nn.Module, **options: Any) -> cf.CompiledStep:
    return cf.compile(net, loss_fn=F.cross_entropy, optimizer=adamw(net), **options)


def in_the_zoo(function: Callable[..., Any], *args: Any) -> tuple[int, set[bool], int]:
    """Runs it. Returns how many steps were verified, which of them to the last bit, and how much over ranks."""
    _, reports = verified(function, *args)
    assert not any(report.differences for report in reports)
    return len(reports), {report.bitwise for report in reports}, max(report.between_ranks for report in reports)


class Waves(nn.Module):
    """Its gradients are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.first @ self.second).abs()


def complex_gradients() -> None:
    torch.manual_seed(0)
    step = cf.compile(Waves(), loss_fn=F.cross_entropy)
    for number in range(2):
        step(*xy(number))


ZOO: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "convnet": (parity.match_ddp, ("convnet", "auto"), 2),
    "transformer": (parity.match_ddp, ("gpt2", "index"), 2),
    "one device": (parity.match_one_device, (True,), 4),
    "level 1": (divided_updates.beside_ddp, ("default",), 3),
    "level 2": (divided_updates.beside_ddp, ("level 2",), 2),
    "level 3": (divided_updates.beside_ddp, ("level 3, across steps",), 2),
    "pairs": (divided_updates.by_pairs, (), 4),
    "bf16": (divided_updates.low_precision, (), 2),
    "tensor parallel": (divided_updates.beside_tensor_parallel, (divided_updates.FURTHER[1:2],), 4),
    "owners": (owned.goes_on_from_its_state, (), 2),
    "micro-batches": (accumulation.shares_updates_otherwise, ("rows alone, sums of rows", "sums of owners"), 3),
    "complex": (complex_gradients, (), 3),
}


@pytest.mark.parametrize("name", ZOO)
def test_nothing_differs_in_the_zoo(ranks: Ranks, name: str) -> None:
    function, args, size = ZOO[name]
    for count, bitwise, between in ranks.values(in_the_zoo, function, *args, size=size):
        assert count and between
        assert bitwise == {size == 2}


OPTIONS: dict[str, dict[str, Any]] = {
    "across steps": {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"},
    "level 2": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": 2, "pad": True}},
    "micro-batches": {"accumulate_steps": 2, "clip_grad_norm": 1.0, "broadcast_buffers": True},
    "semi auto": {"parallel_mode": "semi_auto"},
}


def with_and_without(options: dict[str, Any]) -> None:
    found = []
    for every in (2, None):
        net = square()
        step = compiled(net, **options)
        step.verify(every)
        torch.manual_seed(dist.get_rank())
        losses = [step(*xy(number)) for number in range(6)]
        assert (step.verified is None) == (every is None)
        state = step.state_dict() if "level" not in str(options) else dict(net.state_dict())
        found.append([losses, state, torch.get_rng_state(), step.steps])
    assert_same(*found)


@pytest.mark.parametrize("name", OPTIONS)
def test_training_goes_on_as_without(ranks: Ranks, name: str) -> None:
    ranks.values(with_and_without, OPTIONS[name])


def flip_parameter(executor: Any) -> None:
    """In one rank's largest weight, so that no value gets infinite and takes the others along."""
    if dist.get_rank() == 1:
        values = executor.params["0.weight"].detach().view(-1)
        values[int(values.abs().argmax()) :].view(torch.int32)[0] ^= 1 << 25


def notices_a_parameter() -> str:
    step = compiled(square())
    step.verify(every=2)
    step(*xy(0))
    with damaged_after_snapshot(flip_parameter), pytest.raises(cf.VerificationError) as raised:
        step(*xy(1))
    assert step.verified is not None
    between, first, *others = step.verified.differences
    assert (between.between_ranks, between.what, between.ranks) == (True, "parameter 0.weight", (1,))
    assert (first.what, first.parameter, first.largest_on) == ("parameter 0.weight", "0.weight", 1)
    assert first.size > 0.1 and first.carried_by == "bucket.0/in_place"
    assert {each.ranks for each in others if each.what.startswith("exp_avg of")} == {(0, 1)}  # through the gradients
    step(*xy(2))  # the user may go on; all ranks do
    return str(raised.value)


def test_a_flipped_bit_in_a_parameter_of_one_rank_is_seen_on_all(ranks: Ranks) -> None:
    one, other = ranks.values(notices_a_parameter)
    assert one == other
    assert "The step is done, and its values stay" in one


def flips_a_gradient(options: dict[str, Any]) -> tuple[bool, str]:
    armed = False
    kinds = [c10d.all_reduce_.default, *[kind for kind in messages.ISSUE if "members" in str(kind)]]

    def damaging(issue: Callable[..., Any]) -> Callable[..., Any]:
        def damaged(group: Any, ranks: Any, x: torch.Tensor, *args: Any) -> Any:
            if armed and dist.get_rank() == 1:
                flip_high_bit(x)
            return issue(group, ranks, x, *args)

        return damaged

    step = compiled(square(), **options)
    step.verify(every=3)
    with patch.dict(messages.ISSUE, {kind: damaging(messages.ISSUE[kind]) for kind in kinds}):
        step(*xy(0))
    step(*xy(1))
    armed = True
    with pytest.raises(cf.VerificationError) as raised:
        step(*xy(2))
    assert step.verified is not None
    assert {each.parameter for each in step.verified.differences if "exp_avg" in each.what}
    return step.verified.bitwise, str(raised.value)


@pytest.mark.parametrize("size", [2, 3])
def test_a_flipped_bit_in_a_gradient_of_one_rank_is_seen_on_all(ranks: Ranks, size: int) -> None:
    for options in ({}, {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"pad": True}}):
        found = [outcome.value for outcome in run_soon(ranks, flips_a_gradient, options, size=size)]
        assert len({text for _, text in found}) == 1
        assert [bitwise for bitwise, _ in found] == [size == 2] * size


def swap_members(program: Program) -> None:
    """Two gradients of one shape are written into each other's place in their bucket."""
    by_name = {info(node).name: node for node in program.graph.nodes}
    one, other = by_name["bucket.0/place.0.weight"], by_name["bucket.0/place.3.weight"]
    one.args, other.args = (*one.args[:3], other.args[3]), (*other.args[:3], one.args[3])


def drop_member(program: Program) -> None:
    """One gradient is not reduced."""
    start = next(node for node in program.graph.nodes if is_start(node) and "3.weight" in info(node).name)
    wait_of(start).replace_all_uses_with(start.args[0])
    remove_dead_nodes(program)
    for node in (wait_of(start), start) if start in program.graph.nodes else ():
        program.graph.erase_node(node)


BREAKAGES: dict[str, tuple[Any, Callable[[Program], None], dict[str, Any]]] = {
    "fusion swaps members": (FlattenStorage, swap_members, {}),
    "schedule drops a member": (Overlap, drop_member, {"comm_fusion": {"openstate": False}}),
}


def breaks(name: str) -> list[str]:
    made, damage, options = BREAKAGES[name]
    step = compiled(square(), **options)
    step.verify(every=1)
    with broken(made, damage), pytest.raises(cf.VerificationError):
        step(*xy(0))
    assert step.verified is not None
    return [each.parameter for each in step.verified.differences if each.what.startswith("exp_avg of")]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", BREAKAGES)
def test_a_pass_that_is_broken_is_noticed(ranks: Ranks, name: str, size: int) -> None:
    want = {"0.weight", "3.weight"} if "swaps" in name else {"3.weight"}
    for outcome in run_soon(ranks, breaks, name, size=size):
        assert outcome.ok, outcome.details
        assert {*outcome.value} == want


def drifts() -> str:
    """A rank changes its parameters by itself."""
    net = square()
    step = compiled(net)
    step(*xy(0))
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[0].bias.add_(1e-7)
    step.verify(every=2)
    with pytest.raises(cf.VerificationError) as raised:
        step(*xy(1))
    return str(raised.value)


def test_ranks_that_hold_other_values_are_named(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, drifts):
        assert "parameter 0.bias: rank 1 holds other values than the first rank" in outcome.value


def verify_otherwise() -> int:
    step = compiled(square())
    step.verify(every=2 + dist.get_rank())
    step(*xy(0))
    with pytest.raises(cf.PlanMismatchError) as raised:
        step(*xy(1))
    assert "rank 0: step.verify(every=2)" in str(raised.value)
    assert "rank 1: does not verify this step" in str(raised.value)
    step.verify(every=2)
    step(*xy(1))
    assert step.verified is not None
    return step.verified.step


def test_ranks_have_to_verify_the_same_steps(ranks: Ranks) -> None:
    assert [outcome.value for outcome in run_soon(ranks, verify_otherwise)] == [2, 2]


def no_memory() -> str:
    step = compiled(square())
    step(*xy(0))
    step.verify(every=1)

    def fail(executor: Any) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no memory for copies")

    with damaged_after_snapshot(fail), pytest.raises((MemoryError, cf.PeerFailedError)) as raised:
        step(*xy(1))
    step(*xy(1))  # nothing has been updated, and all ranks go on
    return str(raised.value)


def test_a_rank_without_memory_for_copies_tells_the_others(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, no_memory):
        assert outcome.ok, outcome.details
        assert "no memory for copies" in outcome.value
