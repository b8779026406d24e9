"""With Dynamo in front a module does what DistributedDataParallel does, whatever graphs the model is cut into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import LOOPS, Net, batch, grads
from tests.distributed.models_that_break import Breaks, Counts, Reentrant, Routes
from tests.logs import logged

pytestmark = pytest.mark.dist

MODELS: dict[str, Callable[[], nn.Module]] = {"whole": Net, "breaks": Breaks, "counts": Counts, "reentrant": Reentrant}


def pair(model: nn.Module, **options: Any) -> tuple[Any, nn.Module, Any, nn.Module]:
    """The model compiled, and a copy in DistributedDataParallel."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, capture="dynamo", cpu_kernels=False, **options)
    unused = options.get("find_unused_parameters", False)
    return wrapped, model, nn.parallel.DistributedDataParallel(twin, find_unused_parameters=unused), twin


def compare(*loops: Callable[..., Iterator[Any]], model: nn.Module, **options: Any) -> int:
    """How often the two were compared, in loops one after the other."""
    wrapped, model, other, twin = pair(model, **options)
    counts = []
    for loop in loops:
        torch.manual_seed(3 + dist.get_rank())
        state = torch.get_rng_state()
        ours = list(loop(wrapped, model))
        torch.set_rng_state(state)
        theirs = list(loop(other, twin))
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        except AssertionError as error:
            raise AssertionError(loop.__name__) from error
        model.zero_grad()
        twin.zero_grad()
        counts.append(len(ours))
    return min(counts)


def loops_of(names: list[str], model: str) -> int:
    return compare(*(LOOPS[NAMES.index(name)] for name in names), model=MODELS[model]())


NAMES = [loop.__name__ for loop in LOOPS]
CASES = [
    ("breaks", ["plain", "accumulation", "siamese", "two_losses", "through_one_forward", "local_gradients"]),
    ("breaks", ["freezing"]),
    ("breaks", ["hooks"]),
    ("whole", ["optimizer_in_backward"]),
    ("counts", ["accumulation"]),
    ("reentrant", ["accumulation"]),
]
"""Models, and the loops in which it can matter that there are several graphs."""


@pytest.mark.parametrize(("name", "loops"), CASES)
def test_loops_give_what_ddp_gives(ranks: Ranks, name: str, loops: list[str]) -> None:
    assert min(ranks.values(loops_of, loops, name))


def hooks_that_come_too_early() -> str:
    with pytest.raises(cf.NotAvailableError) as error:
        loops_of(["optimizer_in_backward"], "breaks")
    return str(error.value)


class Sparse(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def sparse_gradients() -> str:
    wrapped, *_ = pair(Sparse(4, 6, sparse=True))
    with pytest.raises(cf.NotAvailableError) as error:
        wrapped(torch.tensor([1, 2])).square().mean().backward()
    return str(error.value)


def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    assert all("sparse=False" in text for text in ranks.values(sparse_gradients))


def test_hooks_that_would_see_local_gradients_are_refused(ranks: Ranks) -> None:
    for text in ranks.values(hooks_that_come_too_early):
        assert "register_post_accumulate_grad_hook" in text and 'capture="trace"' in text


def graphs_of_breaks() -> list[Any]:
    """Graph breaks give several graphs, with buckets within each, and the rest is reduced at the end."""
    wrapped, *_ = pair(Breaks())
    with logged() as messages:
        for step in range(3):
            wrapped(batch(step)).square().mean().backward()
    found = [
        sorted(member for each in graph.collectives if each.kind == "all_reduce" for member in each.members)
        for graph in wrapped.graphs
    ]
    return [found, messages, wrapped.graphs[0].text(), wrapped.explain().text()]


def test_every_graph_has_buckets_of_its_own(ranks: Ranks) -> None:
    for (first, second, third, late), messages, text, explained in ranks.values(graphs_of_breaks):
        assert first == [name.replace("blocks.1", "blocks.0") for name in second]
        assert first[0] == "blocks.0.linear.bias" and "head.weight" in third
        assert late == [
            "blocks.0.linear.weight",
            "python.0.bias",
            "python.0.weight",
            "python.1.bias",
            "python.1.weight",
        ]
        (warning,) = [message for message in messages if "no compiled graph" in message]
        assert "and 4 other parameters" in warning and "TORCH_LOGS=graph_breaks" in warning
        assert "3 compiled graph(s), 0 that run as they are" in explained
        assert "at the end of the backward: reduces " in explained and "4 other(s) in 1 all_reduce(s)" in explained
        assert "%blocks.0.linear/addmm.0" in text and "%blocks.0.norm/" in text and "%blocks.0/sum.0" in text


class Alone(Breaks):
    """Values may leave out the part that stays with Python."""

    is_alone = False

    @torch._dynamo.disable
    def by_python(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x if self.is_alone else self.python(x)
        return out


def left_out_on_rank_0() -> list[str]:
    model = Alone()
    wrapped, *_ = pair(model, broadcast_buffers=False)
    found = []
    for alone in (False, True, False):
        model.is_alone = alone and dist.get_rank() == 0
        model.zero_grad()
        try:
            wrapped(batch(0)).square().mean().backward()
            found.append("")
        except cf.PlanMismatchError as error:
            found.append(str(error))
    return found


def test_ranks_learn_in_the_same_step_that_one_has_more_to_reduce(ranks: Ranks) -> None:
    for before, text, after in ranks.values(left_out_on_rank_0):
        assert "rank 0 has no gradient of python.0.weight" in text and not before and not after


def again_after_a_failure() -> None:
    """A hook fails once in the backward, on all ranks; the backward that comes then reduces."""
    model = Breaks()
    wrapped, *_ = pair(model)
    failures = [KeyError("a hook")]

    def fails_once(grad: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    model.get_parameter("python.0.weight").register_hook(fails_once)
    loss = wrapped(batch(0)).square().mean()
    with pytest.raises(KeyError, match="a hook"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    for grad in grads(model):
        held = [torch.empty_like(grad) for _ in range(dist.get_world_size())] if grad is not None else []
        if grad is not None:
            dist.all_gather(held, grad)
        assert all(torch.equal(each, held[0]) for each in held)


def test_a_backward_that_has_failed_is_not_around_the_next(ranks: Ranks) -> None:
    ranks.values(again_after_a_failure)


class Fails(Breaks):
    """One rank fails in Python, between two graphs."""

    fails = False

    @torch._dynamo.disable
    def by_python(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("a bad sample")
        return x


def failing() -> list[str]:
    model = Fails()
    wrapped, *_ = pair(model)
    wrapped(batch(0)).square().mean().backward()
    model.fails = dist.get_rank() == 1
    with pytest.raises((KeyError, cf.PeerFailedError)) as error:
        wrapped(batch(1)).square().mean().backward()
    model.fails = False
    wrapped(batch(2)).square().mean().backward()  # and on
    return [type(error.value).__name__, str(error.value)]


def test_a_rank_that_fails_between_graphs_is_named(ranks: Ranks) -> None:
    (name, text), other = ranks.values(failing)
    assert name == "PeerFailedError" and "rank 1" in text and "a bad sample" in text and other[0] == "KeyError"


def rows(way: int) -> torch.Tensor:
    return torch.full((4, 6), float(way), dtype=torch.float64)


def routed(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Each rank goes its own way through the model, which values decide; one part is used in a micro-batch only, and
    one nowhere, so that its gradient is kept."""
    for param in model.get_submodule("parts.3").parameters():
        param.grad = torch.ones_like(param)
    for step in range(5):
        if step % 2:
            with wrapped.no_sync():
                wrapped(
                    torch.full((4, 6), 2.0 * (dist.get_rank() == 0), dtype=torch.float64)
                ).square().mean().backward()
        way = (dist.get_rank() + step) % 2 if step < 4 else 0
        wrapped(torch.full((4, 6), float(way), dtype=torch.float64)).square().mean().backward()
        yield grads(model)
        model.zero_grad(set_to_none=step % 3 == 0)


def ways() -> int:
    return compare(routed, model=Routes(), find_unused_parameters=True)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_run_other_graphs(ranks: Ranks, size: int) -> None:
    assert min(ranks.values(ways, size=size))


def other_ways() -> str:
    model = Routes()
    wrapped, *_ = pair(model)
    with pytest.raises(cf.PlanMismatchError) as error:
        wrapped(rows(dist.get_rank())).square().mean().backward()
    model.zero_grad()
    wrapped(rows(0)).square().mean().backward()  # and on
    return str(error.value)


def test_ranks_that_run_other_graphs_are_told(ranks: Ranks) -> None:
    for text in ranks.values(other_ways):
        assert "rank 1 has no gradient of parts.0.weight" in text and "find_unused_parameters=True" in text


def sizes(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for rows in (3, 3, 5, 6, 7, 4):
        wrapped(batch(rows, rows)).square().mean().backward()
        yield grads(model)


def of_any_size() -> list[Any]:
    """The second size makes Dynamo compile for any: then nothing is compiled again."""
    with logged() as messages:
        compare(sizes, model=Net())
    wrapped, *_ = pair(Net())
    counts = []
    for rows in (3, 5, 6, 7):
        wrapped(batch(rows, rows)).square().mean().backward()
        counts.append(len(wrapped.graphs))
        skips = "the graph is for any size; skipped passes: merge_equal, " in wrapped.explain().text()
        assert skips == (rows > 3)
        for buffer in wrapped.buffers():
            held = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
            dist.all_gather(held, buffer)
            assert torch.equal(*held)
    return [counts, [message for message in messages if "no compiled graph" in message]]


def test_nothing_is_compiled_per_size(ranks: Ranks) -> None:
    for counts, warnings in ranks.values(of_any_size):
        assert counts == [1, 2, 2, 2] and not warnings


def compiled_too_often() -> list[str]:
    """A frame past Dynamo's limit runs in Python: its gradients are reduced, and a warning names them."""
    with torch._dynamo.config.patch(recompile_limit=1), logged() as messages:
        compare(modes, model=Net())
    return messages


def modes(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    for step in range(4):
        model.dropout.p = 0.1 * step
        wrapped(batch(step)).square().mean().backward()
        yield grads(model)


def test_a_frame_past_the_limit_is_reduced(ranks: Ranks) -> None:
    for messages in ranks.values(compiled_too_often):
        assert any("got a gradient that no compiled graph has computed" in message for message in messages)


def sums(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Micro-batches, then backwards on top of what has been reduced. Graphs of later steps are for any size."""
    scale = 1 if isinstance(wrapped, cf.CompiledModule) else dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        with wrapped.no_sync():
            for part in range(2):
                wrapped(batch(10 * step + part, 4 + step)).square().mean().backward()
        kept = model.get_parameter("python.0.weight").grad
        for part in range(2):
            wrapped(batch(10 * step + part + 5, 4 + step)).square().mean().backward()
            yield [None if grad is None else grad * scale for grad in grads(model)]
        assert kept is model.get_parameter("python.0.weight").grad


def sums_of_a_model(name: str) -> int:
    return compare(sums, model=MODELS[name](), gradients_mean=False)


@pytest.mark.parametrize("name", ["breaks", "reentrant"])
def test_sums_of_gradients(ranks: Ranks, name: str) -> None:
    assert min(ranks.values(sums_of_a_model, name))


def sums_of_two() -> str:
    model = Breaks()
    wrapped, *_ = pair(model, gradients_mean=False)
    again = cf.compile(model, capture="dynamo", cpu_kernels=False, gradients_mean=False)
    found = []
    for call in (wrapped, again, wrapped):  # each is there beside the other
        model.zero_grad()
        torch.manual_seed(7 + dist.get_rank())
        call(batch(0)).square().mean().backward()
        found.append(grads(model))
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-10, atol=1e-10)
    with pytest.raises(cf.NotAvailableError) as error, wrapped.no_sync():
        wrapped(batch(0)).square().mean().backward()
    return str(error.value)


def test_sums_of_one_model_that_was_compiled_twice(ranks: Ranks) -> None:
    for text in ranks.values(sums_of_two):
        assert "holds a sum over the ranks" in text and "zero_grad()" in text


def sums_of_ways(wrapped: Any, model: nn.Module) -> Iterator[Any]:
    """Ranks that go other ways, on top of what has been reduced."""
    scale = 1 if isinstance(wrapped, cf.CompiledModule) else dist.get_world_size()
    for step in range(2):
        with wrapped.no_sync():
            wrapped(rows(2 * (dist.get_rank() == 0))).square().mean().backward()
        for part in range(3):
            wrapped(rows((dist.get_rank() + part) % 2)).square().mean().backward()
            yield [None if grad is None else grad * scale for grad in grads(model)]
        model.zero_grad(set_to_none=step == 1)


def sums_of_other_graphs() -> int:
    return compare(sums_of_ways, model=Routes(), find_unused_parameters=True, gradients_mean=False)


def test_sums_where_ranks_run_other_graphs(ranks: Ranks) -> None:
    assert min(ranks.values(sums_of_other_graphs))


def lowered_on_one_rank(options: dict[str, Any]) -> list[list[str]]:
    """What one rank looks at sends nothing, and calls go on as they would have."""
    wrapped, model, other, twin = pair(Breaks(), **options)
    found = None
    for step in range(2):
        if dist.get_rank() == step:
            found = wrapped.lower(batch(0))
        for call in (wrapped, other):
            torch.manual_seed(step)
            call(batch(step)).square().mean().backward()
        torch.testing.assert_close(grads(model), grads(twin), rtol=1e-10, atol=1e-10)
    assert found is not None
    return [[graph.fingerprint for graph in found.graphs], [graph.fingerprint for graph in wrapped.graphs]]


@pytest.mark.parametrize("mode", ["auto", "optimal"])
def test_one_rank_may_look(ranks: Ranks, mode: str) -> None:
    for found, ran in ranks.values(lowered_on_one_rank, {"comm_fusion": {"allreduce": {"mode": mode, "config": None}}}):
        assert found == ran
