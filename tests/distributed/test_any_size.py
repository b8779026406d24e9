"""Graphs for any size: one compile serves all sizes, and gradients leave in planned buckets while autograd computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import commfuse_fx as cf
from commfuse_fx.frontends.torch_backend import commfuse
from commfuse_fx.planning import compile_call
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import batch, grads
from tests.distributed.models_that_break import Routes
from tests.distributed.test_dynamo import compare, loops_of, pair, routed
from tests.logs import logged

pytestmark = pytest.mark.dist


def any_size() -> Any:
    """Dynamo's first graph is for any size already."""
    return torch._dynamo.config.patch(assume_static_by_default=False)


class Words(nn.Module):
    """A tied weight, dropout, and views whose sizes are those of the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embedding(words)
        for layer in self.layers:
            h = h + F.dropout(torch.tanh(layer(h)), 0.25)
        h = self.norm(h).reshape(words.shape[0] * words.shape[1], 6)
        return h @ self.embedding.weight.t()


def words(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rows + length)
    return torch.randint(12, (rows, length), generator=generator)


LENGTHS = ((4, 4), (4, 6), (5, 7), (7, 1), (1, 0), (0, 3), (9, 9))
"""What the two ranks have in one step: at first a graph for this size, then one for any; 0 and 1 have their own."""


def of_other_lengths(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step, lengths in enumerate(LENGTHS):
        (wrapped(words(2 + step % 2, lengths[dist.get_rank()])).square().sum() / 100).backward()
        yield grads(model)
        model.zero_grad(set_to_none=step % 2 == 0)


def other_lengths(fusion: dict[str, Any]) -> int:
    return compare(of_other_lengths, model=Words(), comm_fusion=fusion)


@pytest.mark.parametrize("is_fused", [True, False])
def test_ranks_may_have_other_sizes_in_one_step(ranks: Ranks, is_fused: bool) -> None:
    assert ranks.values(other_lengths, {"openstate": is_fused}) == [len(LENGTHS)] * 2


def compiles() -> list[tuple[int, int]]:
    """How many graphs are captured, and how many Dynamo has made, by the step."""
    captured: list[Any] = []
    found: list[tuple[int, int]] = []
    joint = compile_call.capture_joint

    def counted(*args: Any, **kwargs: Any) -> Any:
        captured.append(args[0])
        return joint(*args, **kwargs)

    wrapped, *_ = pair(Words())
    before = counters["stats"]["unique_graphs"]
    with (
        mock.patch.object(compile_call, "capture_joint", counted),  # the rank runs other tests later
        torch._dynamo.config.patch(automatic_dynamic_shapes=True),
    ):
        for length in (4, 5, 6, 7, 8, 9):
            wrapped(words(2, length)).square().sum().backward()
            found.append((len(captured), counters["stats"]["unique_graphs"] - before))
    return found


def test_one_compile_serves_all_sizes(ranks: Ranks) -> None:
    for found in ranks.values(compiles):
        # A graph for the first size, and the communication of one for any, in the order that a trace of it has.
        assert [number for number, _ in found] == [1, 3, 3, 3, 3, 3]
        assert [number for _, number in found] == [1, 2, 2, 2, 2, 2]


def marked(model: Words) -> Words:
    cf.set_comm_fusion(model.layers[1], 3)
    return model


OPTIMAL: dict[str, Any] = {"allreduce": {"mode": "optimal", "config": None}}
FUSION: list[dict[str, Any]] = [
    {"allreduce": {"mode": "index", "config": [2, 4]}},
    {"allreduce": {"mode": "size", "config": 1}},
    {"openstate": False},
    OPTIMAL,
]


def buckets(fusion: dict[str, Any]) -> list[Any]:
    with logged() as messages:
        wrapped, *_ = pair(marked(Words()), comm_fusion=fusion)
    assert any("buckets of 25 MiB" in message for message in messages) == (fusion == OPTIMAL)
    for length in (4, 5):
        wrapped(words(2, length)).square().sum().backward()
    graphs = wrapped.graphs
    sent = [[(each.kind, each.members, each.bytes, each.fusion_id) for each in graph.collectives] for graph in graphs]
    return [sent, [bool(graph.program.by_autograd) for graph in graphs], wrapped.explain().text()]


@pytest.mark.parametrize("fusion", FUSION, ids=["index", "size", "off", "optimal"])
def test_buckets_are_those_of_a_known_size(ranks: Ranks, fusion: dict[str, Any]) -> None:
    for (known, for_any), by_autograd, text in ranks.values(buckets, fusion):
        assert by_autograd == [False, True]
        assert known == for_any and any(fusion_id == 3 for *_, fusion_id in known)
        (line,) = [line for line in text.splitlines() if "for any size" in line]
        assert line.endswith("; skipped passes: merge_equal, compute_once, gradients_first")


def events() -> list[str]:
    """What happens in a backward, in order: gradients that autograd has computed, and collectives that begin."""
    found: list[str] = []
    model = Words()
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: found.append(name))
    fusion = {"allreduce": {"mode": "index", "config": [1, 3, 5]}}
    with any_size():
        wrapped, *_ = pair(model, comm_fusion=fusion)
        loss = wrapped(words(2, 4)).square().sum()
    start = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        found.append("all_reduce")
        return start(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        loss.backward()
    finally:
        dist.all_reduce = start
    return found


def test_buckets_leave_inside_of_the_backward(ranks: Ranks) -> None:
    for found in ranks.values(events):
        assert found.count("all_reduce") == 4
        first = found.index("all_reduce")
        assert set(found[:first]) == {"norm.weight", "norm.bias"}
        assert found[first + 1 : first + 3] in (
            ["layers.1.bias", "layers.1.weight"],
            ["layers.1.weight", "layers.1.bias"],
        )
        assert found[-2:] == ["embedding.weight", "all_reduce"]


def loops_for_any_size(loops: list[str]) -> int:
    with any_size():
        return loops_of(loops, "breaks")


@pytest.mark.parametrize("loops", [["accumulation", "siamese", "through_one_forward"], ["freezing"], ["hooks"]])
def test_loops_with_graphs_for_any_size_give_what_ddp_gives(ranks: Ranks, loops: list[str]) -> None:
    assert min(ranks.values(loops_for_any_size, loops))


def ways_for_any_size() -> int:
    """With plans by cost, for which ranks would have to come to a graph at the same time."""
    with any_size():
        compare(routed, model=Routes(), find_unused_parameters=True)
    return compare(routed, model=Routes(), find_unused_parameters=True, comm_fusion=OPTIMAL)


def test_ranks_may_run_other_graphs_for_any_size(ranks: Ranks) -> None:
    assert min(ranks.values(ways_for_any_size))


def summed() -> None:
    """Sums over the ranks, and in a step a part of the model that no rank uses."""
    with any_size():
        wrapped, model, other, twin = pair(Words(), gradients_mean=False)
        torch.manual_seed(dist.get_rank())
        for length in (4, 5):
            state = torch.get_rng_state()
            for call in (wrapped, other):
                torch.set_rng_state(state)
                call(words(2, length)).square().sum().backward()
    means = [None if grad is None else grad * dist.get_world_size() for grad in grads(twin)]
    torch.testing.assert_close(grads(model), means, rtol=1e-10, atol=1e-10)


def test_gradients_of_any_size_may_be_summed(ranks: Ranks) -> None:
    ranks.values(summed)


class Parts(nn.Module):
    """Outputs that a loss need not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def unused() -> list[Any]:
    with any_size():
        wrapped, model, *_ = pair(Parts())
        wrapped(batch(0, 3))[0].sum().backward()
    assert model.get_parameter("right.weight").grad is None
    return [grad for grad in grads(model) if grad is not None]


def test_what_a_loss_does_not_use_has_no_gradient(ranks: Ranks) -> None:
    one, two = ranks.values(unused)
    torch.testing.assert_close(one, two)


def through_the_backend() -> list[str]:
    torch._dynamo.reset()
    model, twin = Words(), Words()
    call = torch.compile(model, backend=commfuse, dynamic=True, options={"cpu_kernels": False})
    other = nn.parallel.DistributedDataParallel(twin)
    with logged() as messages:
        for step, length in enumerate((4, 6 - dist.get_rank(), 9)):
            for each in (call, other):
                torch.manual_seed(step)
                each(words(2, length)).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(twin), rtol=1e-10, atol=1e-10)
    return [message for message in messages if "for any size" in message]


def test_the_backend_of_torch_compile_for_any_size(ranks: Ranks) -> None:
    assert [len(messages) for messages in ranks.values(through_the_backend)] == [1, 1]


def failing() -> list[str]:
    """A hook fails on one rank, when the other one has begun to send."""
    model = Words()
    fusion = {"allreduce": {"mode": "index", "config": [1, 3, 5]}}
    with any_size():
        wrapped, *_ = pair(model, comm_fusion=fusion)
        if dist.get_rank() == 1:
            model.embedding.weight.register_hook(lambda grad: {}["a bad gradient"])
        with pytest.raises((KeyError, cf.CollectiveError)) as error:
            wrapped(words(2, 4)).square().sum().backward()
    return [type(error.value).__name__, str(error.value)]


def test_a_rank_that_fails_between_buckets_is_named(ranks: Ranks) -> None:
    (name, text), other = ranks.values(failing)
    assert other[0] == "KeyError" and "a bad gradient" in other[1]
    assert name == "CollectiveError" and "rank 1: KeyError" in text


def uneven() -> list[Any]:
    """Rank 0 has one batch, and rank 1 three, each of another length."""
    found = []
    with any_size():
        wrapped, model, other, twin = pair(Words())
        for call, each in ((wrapped, model), (other, twin)):
            torch.manual_seed(dist.get_rank())
            optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
            with call.join():
                for step in range(1 + 2 * dist.get_rank()):
                    optimizer.zero_grad()
                    (call(words(2, 4 + step)).square().sum() / 100).backward()
                    optimizer.step()
            found.append([param.detach() for param in each.parameters()])
    return found


def test_ranks_may_have_other_numbers_of_batches_of_other_sizes(ranks: Ranks) -> None:
    for ours, theirs in ranks.values(uneven):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
