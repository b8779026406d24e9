"""Searches inside of data parallel: over the first mesh axis the batch alone is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.planning import compile_call
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.search import searched
from commfuse_fx.sharding.search.axis_search import AxisSearch
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from tests.models import CONV, MLP_CASE, TIED, Case
from tests.sharding.divided_oracle import compare
from tests.sharding.test_search import SLOW_FLOPS, SLOW_MEMORY, lowered, mlp
from tests.sharding.test_search_rounds import divide_of, planned


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    only = Variants((Variant.of(inner=True),))
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: only)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("ways", [0, 4], ids=["whole batch", "parts"])
@pytest.mark.parametrize(
    ("case", "cluster"),
    [(MLP_CASE, SLOW_FLOPS), (MLP_CASE, SLOW_MEMORY), (CONV, SLOW_FLOPS), (TIED, SLOW_MEMORY)],
    ids=["mlp, slow flops", "mlp, slow memory", "conv", "tied"],
)
def test_equals_one_device(case: Case, cluster: ClusterSpec, ways: int) -> None:
    found = compare(case, (2, 2), parallel_mode="auto", cluster=cluster, ways=ways, gradients=False, steps=2)
    axes = {group for param in found.program.params.values() for group, _ in param.layout}
    assert axes <= {"tp"} and (axes or cluster is not SLOW_MEMORY)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("mesh", [(2, 4), (2, 2, 2)], ids=str)
def test_a_file_gives_the_same_graph(mesh: tuple[int, ...], tmp_path: Path) -> None:
    x, file = torch.empty(8, 256), tmp_path / "strategies.json"
    found: list[Any] = []
    for key in ("save", "load"):
        options = {f"strategy_ckpt_{key}_file": file, "search_mode": "recursive_programming", "mesh": mesh}
        found.append(lowered(mlp(256, 1), F.mse_loss, x, x, cluster=SLOW_MEMORY, **options))
    assert found[0].text() == found[1].text()
    assert list(Strategies.load(file).axes) == ["tp", "pp"][: len(mesh) - 1]


@pytest.mark.parametrize(("mesh", "count"), [((8,), 0), ((2, 4), 1), ((8, 1), 0)], ids=str)
def test_it_is_among_the_plans_of_several_axes(mesh: tuple[int, ...], count: int) -> None:
    made, _ = planned(8, 256, 1, mesh=mesh)
    first = [divide_of(each) for each in made if not divide_of(each).exposed]
    assert sum(each.inner for each in first) == count


@pytest.mark.usefixtures("inside")
def test_sums_over_the_first_axis_count_as_each_search_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another search of the same compile has priced them already."""
    given: list[Any] = []
    real = searched.searched

    def search(program: Program, axes: Any, costs: CostModel, *others: Any) -> Any:
        given[:] = program.copy(), axes, costs
        return real(program, axes, costs, *others)

    monkeypatch.setattr(searched, "searched", search)
    x = torch.empty(8, 64)
    lowered(mlp(64, 1), F.mse_loss, x, x, mesh=(2, 4))
    program, axes, costs = given
    known, sums = KnownLayouts(), []
    for exposed in ("", "0% of gradients on dp"):
        problems = [AxisSearch(program, costs, exposed, each).problem(axes) for each in (None, known)]
        alone, shared = ([table.tolist() for table in each.graph.unary] for each in problems)
        assert shared == alone
        sums.append(sum(map(sum, alone)))
    assert sums[1] < sums[0]
