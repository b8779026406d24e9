"""Groups of one mesh axis that lie differently in the cluster: the step waits for the slowest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.machine.presets import preset
from tests.cost.graphs import Graph, f32

NODES = preset("h100-ib-2")  # ranks 0..7 and 8..15
INSIDE, ACROSS = tuple(range(6)), tuple(range(6, 12))


@pytest.mark.parametrize("devices", [None, (5, 11, 0, 3, 9, 1, 7, 2, 8, 4, 10, 6)], ids=["in order", "shuffled"])
@pytest.mark.parametrize("group", ["dp", "tp", "pp", "dp,pp", "tp,pp", "dp,tp,pp"])
def test_all_groups_at_once_are_those_of_the_ranks(group: str, devices: tuple[int, ...] | None) -> None:
    mesh = Mesh((2, 3, 2), ("dp", "tp", "pp"), devices)
    groups = mesh.groups(group)
    assert len(groups) == mesh.world // mesh.size(group)
    assert set(groups) == {mesh.ranks(group, rank) for rank in range(mesh.world)}


@pytest.mark.parametrize("devices", [None, (*ACROSS, *INSIDE)], ids=["rank 0 inside", "rank 0 across"])
@pytest.mark.parametrize("nbytes", [1, 1 << 30])
def test_an_axis_costs_what_its_most_expensive_group_costs(nbytes: int, devices: tuple[int, ...] | None) -> None:
    graph = Graph()
    start = graph.start("sum", graph.input("gradient", f32(1 << 20)), group="tp")
    cost = CostModel(NODES).cost_of(start, nbytes, mesh=Mesh((2, 6), ("dp", "tp"), devices))
    inside, across = (collective_cost("all_reduce", nbytes, group, NODES) for group in (INSIDE, ACROSS))
    assert cost == across
    assert cost.seconds > inside.seconds
    assert "infiniband" in cost.links


def test_groups_that_lie_alike_are_priced_once() -> None:
    large = preset("h100-ib-512")
    assert len(large.distinct(Mesh.of_sizes((2048, 2)).groups("tp"))) == 1
    assert len(large.distinct(Mesh.of_sizes((682, 6)).groups("tp"))) == 2  # in one host, or in two
    assert large.distinct([(0, 1), (8, 9), (0, 8), (2, 3)]) == [(0, 1), (0, 8)]


def test_a_simulated_step_has_the_prices_of_the_slowest_group() -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    cf.shard(model[0], weight=("tp", None))
    cf.shard(model[1], weight=(None, "tp"))
    x = torch.randn(8, 48)
    step = cf.compile(
        model, loss_fn=F.mse_loss, parallel_mode="semi_auto", mesh=(2, 6), device_num=12, cluster="h100-ib-2"
    )
    simulated = step.lower(x, x).simulate()
    slowest = [each for each in simulated.collectives if "group=tp" in each.description]
    assert slowest
    for each in slowest:
        assert each.seconds >= collective_cost(each.description.split()[0], 1, ACROSS, NODES).seconds
