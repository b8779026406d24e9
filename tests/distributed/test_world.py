"""One plan for all ranks, groups over meshes, and the start of the world."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commfuse_fx as cf
from commfuse_fx.runtime.ranks.ballot_box import ballot_box
from tests.distributed.harness import Hung, Ranks
from tests.distributed.models_of_ranks import adamw, compiled, mlp, xy


def lowered_text(virtual: bool) -> tuple[str, str]:
    """The text and the fingerprint of a plan for two ranks."""
    model = mlp()
    options = {"device_num": 2, "global_rank": 1} if virtual else {}
    lowered = compiled(
        model, adamw(model), comm_fusion={"allreduce": {"mode": "index", "config": [2]}}, **options
    ).lower(*xy(0, rank=0))
    return lowered.text(), lowered.fingerprint


def test_every_rank_hash_seed_and_virtual_world_has_the_same_plan(ranks: Ranks) -> None:
    expected = lowered_text(virtual=True)
    assert ranks.values_of_other_seeds(lowered_text, False) == [expected, expected]


def identity() -> tuple[int, int]:
    cf.init()  # again: does nothing
    return cf.get_rank(), cf.get_group_size()


def test_rank_and_group_size(ranks: Ranks) -> None:
    assert ranks.values(identity, size=1) == [(0, 1)]
    assert ranks.values(identity) == [(0, 2), (1, 2)]
    assert (cf.get_rank(), cf.get_group_size()) == (0, 1)


class Exchange(nn.Module):
    """Every collective over one axis of the mesh, on `scale * rank`-like values."""

    def __init__(self, axis: str | None) -> None:
        super().__init__()
        self.axis = axis
        self.scale = nn.Parameter(torch.ones(()))

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x * self.scale
        return [
            cf.ops.all_reduce(x, "sum", self.axis),
            cf.ops.all_reduce(x, "avg", self.axis),
            cf.ops.all_gather(x, 1, self.axis),
            cf.ops.reduce_scatter(x, "sum", 0, self.axis),
            cf.ops.broadcast(x, 1, self.axis),
            cf.ops.all_to_all(x, 0, self.axis),
        ]

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([part.reshape(-1) for part in self.parts(x)])
        return (flat * weights[: flat.numel()]).sum()


class OneExchange(Exchange):
    """A single collective."""

    def __init__(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(None)
        self.collective = collective

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.collective(x * self.scale)]


AXES = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)], "dp,tp": [(0, 1, 2, 3)], None: [(0, 1, 2, 3)]}


def values_of(rank: int) -> torch.Tensor:
    return torch.arange(8.0).view(4, 2) + 10 * rank


def expected_loss(peers: tuple[int, ...], rank: int, weights: torch.Tensor) -> torch.Tensor:
    all_x = [values_of(peer) for peer in peers]
    me, rows = peers.index(rank), 4 // len(peers)
    mine = slice(me * rows, (me + 1) * rows)
    total = torch.stack(all_x).sum(0)
    parts = [
        total,
        total / len(peers),
        torch.cat(all_x, 1),
        total[mine],
        all_x[1],
        torch.cat([x[mine] for x in all_x]),
    ]
    flat = torch.cat([part.reshape(-1) for part in parts])
    return (flat * weights[: flat.numel()]).sum()


def exchange(axis: str | None, own_mesh: bool) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if own_mesh else (2, 2)
    rank = cf.get_rank()
    peers = next(group for group in AXES[axis] if rank in group)
    weights = torch.arange(100.0) + rank
    model = Exchange(axis)
    loss = cf.compile(model, mesh=mesh, gradients_mean=False, form="step")(values_of(rank), weights)
    torch.testing.assert_close(loss, expected_loss(peers, rank, weights))
    assert model.scale.grad is not None
    # The loss is linear in scale: its derivative is the loss itself, summed over all ranks.
    total = loss.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(model.scale.grad, total)
    return float(model.scale.grad)


@pytest.mark.parametrize("own_mesh", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_collectives_over_the_axes_of_a_mesh(ranks: Ranks, axis: str | None, own_mesh: bool) -> None:
    assert len(set(ranks.values(exchange, axis, own_mesh, size=4))) == 1


def timeouts() -> list[float]:
    """Of the votes, and of the groups made for mesh axes."""
    model = Exchange("tp")
    step = cf.compile(model, mesh=(2, 2), form="step")
    step(values_of(cf.get_rank()), torch.ones(100))
    assert step.session.runners.groups is not None
    groups = [ballot_box().group, step.session.runners.groups["tp"], step.session.runners.groups["dp"]]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_group_has_the_time_out_of_the_world(ranks: Ranks) -> None:
    assert ranks.values(timeouts, size=4, world_timeout=33.0) == [[33.0] * 3] * 4


def wrong_mesh() -> None:
    cf.compile(mlp(), mesh=(3, 2), form="step")


def test_a_mesh_that_does_not_fit_the_world(ranks: Ranks) -> None:
    for outcome in ranks.run(wrong_mesh):
        assert outcome.error.startswith("ConfigValueError: mesh=(3, 2) has 6 devices, but the world has 2 processes")


def backward_mesh(collective: str) -> float:
    """A step on a mesh that lists rank 1 before rank 0. Returns its loss."""
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    model = OneExchange(getattr(cf.ops, collective))
    return float(cf.compile(model, mesh=mesh, form="step")(values_of(cf.get_rank()), torch.ones(100)).detach())


def test_a_mesh_whose_ranks_do_not_ascend(ranks: Ranks) -> None:
    total = float((values_of(0) + values_of(1)).sum())
    assert ranks.values(backward_mesh, "all_reduce") == [total, total]
    for outcome in ranks.run(backward_mesh, "all_gather"):
        assert outcome.error.startswith("ConfigValueError: the mesh lists ranks 1, 0 in this order along dp")


def mesh_without_names() -> float:
    model = OneExchange(lambda x: cf.ops.all_gather(x, 0, "dp,tp"))
    step = cf.compile(model, mesh=DeviceMesh("cpu", torch.arange(4).view(2, 1, 2)), form="step")
    return float(step(values_of(cf.get_rank()), torch.ones(100)).detach())


def test_a_group_of_several_axes_of_a_mesh_without_names(ranks: Ranks) -> None:
    sums = [float(values_of(rank).sum()) for rank in range(4)]
    assert ranks.values(mesh_without_names, size=4) == [sums[0] + sums[2], sums[1] + sums[3]] * 2


def on_another_default_device(has_dropout: bool) -> tuple[float, float]:
    """The losses of two equal steps, of which the second runs while new tensors have no values."""
    model = nn.Sequential(mlp(), nn.Dropout(0.5 if has_dropout else 0.0))
    step = compiled(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    batch = xy(0)
    torch.manual_seed(1)
    losses = [float(step(*batch).detach())]
    torch.manual_seed(1)
    torch.set_default_device("meta")
    try:
        losses.append(float(step(*batch).detach()))
    finally:
        torch.set_default_device(None)
    return losses[0], losses[1]


@pytest.mark.parametrize("has_dropout", [False, True])
def test_the_default_device_of_new_tensors_does_not_matter(ranks: Ranks, has_dropout: bool) -> None:
    for one, other in ranks.values(on_another_default_device, has_dropout):
        assert one == other


def wait_forever() -> None:
    if cf.get_rank() == 1:
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), 1)


def test_the_harness_shows_where_ranks_hang() -> None:
    pool = Ranks()
    pool.values(cf.get_rank)  # the time-out need not last for the start of processes
    with pytest.raises(Hung, match=r"(?s)ranks \[0, 1\] did not end.*in wait_forever.*in wait_forever"):
        pool.run(wait_forever, timeout=4.0)
