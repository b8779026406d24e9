"""Searches and simulations in turns: what a plan exposes of its communication is what the next search counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import cost_model
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.planning.variants.attempts import Attempt
from commfuse_fx.planning.variants.plan_names import plan_name
from commfuse_fx.planning.variants.strategy_rounds import COMPARED
from commfuse_fx.sharding.dividing.axis import Pin
from commfuse_fx.sharding.dividing.decisions import Decisions, State
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.search.exposure import GRADIENT, PARAMETER, Exposure, exposure_of
from commfuse_fx.sharding.search.layout_problem import LayoutProblem
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.simulate.rounds import play
from tests.sharding.test_search import caught, lowered, mlp


def planned(rows: int, width: int, layers: int = 2, **options: Any) -> tuple[list[Attempt], Any]:
    """All plans of a step, and the one that is taken."""
    model, made = mlp(width, layers), []
    options = {"parallel_mode": "auto", "device_num": 8, "mesh": (8,), "cluster": "h100-node", **options}
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.AdamW(model.parameters()), **options)
    step.planner.on_plan = made.append
    x = torch.empty(rows, width)
    return made, step.lower(x, x)


def seconds_of(made: Attempt) -> float:
    assert made.seconds is not None
    return made.seconds


def divide_of(made: Attempt) -> Divide:
    return next(each for each in made.pipeline.passes if isinstance(each, Divide))


def test_a_search_counts_what_a_simulated_plan_has_exposed() -> None:
    made, found = planned(256, 512)
    costs = cost_model(resolve_cluster("h100-node"))
    plain, first, *others = made  # the one without a search is there soon
    assert (divide_of(first).searched, divide_of(first).exposed, divide_of(plain).searched) == (True, "", False)
    assert others and all(divide_of(each).exposed for each in others)
    simulated = {str(exposure_of(each.program, play(each.program, costs))) for each in made}
    assert {divide_of(each).exposed for each in others} <= simulated
    seconds = [each.seconds for each in made]
    assert found.simulate().step_seconds == pytest.approx(min(seconds), abs=1e-9) and min(seconds) <= plain.seconds
    notes = {note.subject: note.reason for note in found.program.notes if note.topic == "search"}
    assert f"{min(seconds) * 1e3:.3f} ms simulated; exposed of its communication: " in notes["the whole step"]
    assert "ms by the prices of the search" in notes["dp"]
    compared = [note for note in found.program.notes if note.topic == COMPARED]
    assert compared[0].subject == f"{plan_name(min(made, key=seconds_of))}, dp=8"
    figures = {note.reason for note in compared}
    assert f"{plain.seconds * 1e3:.3f} ms simulated" in figures and len(figures) == len({*seconds})
    priced = f"{first.program.search_seconds * 1e3:.3f} ms by the prices of its search"
    assert f"{priced}, {first.seconds * 1e3:.3f} ms simulated" in figures


def test_a_search_that_comes_to_data_parallel_stands_for_it() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    step = cf.compile(
        model,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=torch.optim.SGD(model.parameters()),
        parallel_mode="auto",
        device_num=8,
        mesh=(8,),
        cluster="h100-node",
    )
    made: list[Attempt] = []
    step.planner.on_plan = made.append
    x = torch.empty(1 << 14, 3)
    found = step.lower(x, x)
    plain = made[0].program
    assert not divide_of(made[0]).searched and plain is not None and all(divide_of(each).exposed for each in made[1:])
    notes = {note.subject: note.reason for note in plain.notes if note.topic == "search"}
    assert "ms by the prices of the search; elimination" in notes["dp"]
    assert plain.search_seconds and plain.strategies.axes["dp"].states
    compared = {note.subject: note.reason for note in found.program.notes if note.topic == COMPARED}
    assert f"{seconds_of(made[0]) * 1e3:.3f} ms simulated" in compared["search, dp=8"]


@pytest.mark.parametrize(("rows", "width"), [(8, 1024), (4096, 64)])
def test_rounds_end_where_a_graph_comes_again(rows: int, width: int) -> None:
    made, found = planned(rows, width)
    texts = {divide_of(each): text_of(each) for each in made}
    assert len(set(texts.values())) == len(texts) <= 6
    assert planned(rows, width)[1].fingerprint == found.fingerprint


def text_of(made: Attempt) -> str:
    assert made.program is not None and made.program.strategies is not None
    return str(made.program.strategies.to_json())


def test_what_is_exposed_is_that_of_the_simulation() -> None:
    _, found = planned(4096, 64)
    simulation = found.simulate()
    kinds = {info(node).name: info(node).collective.role for node in found.program.collectives()}
    exposure = exposure_of(found.program, play(found.program, cost_model(resolve_cluster("h100-node"))))
    gradients = [each for each in simulation.collectives if "gradient" in kinds[each.name]]
    waited, on_wire = (sum(getattr(each, name) for each in gradients) for name in ("exposed", "seconds"))
    assert gradients and exposure.of("dp", GRADIENT) == round(waited / on_wire, 2)
    assert Exposure.parse(str(exposure)) == exposure and exposure.of("tp", GRADIENT) == 1.0
    assert Exposure.parse("").parts == () and str(Exposure()) == ""
    with pytest.raises(ConfigValueError, match="write parts such as"):
        Exposure.parse("31% gradients")


def test_what_passes_in_bursts_counts_as_little_as_it_takes() -> None:
    _, found = planned(256, 512, cluster="gloo-1gbit")
    cluster = resolve_cluster("gloo-1gbit")
    (level,) = cluster.levels
    bursts = replace(cluster, levels=(replace(level, burst_bytes=1e9, burst_bandwidth=100 * level.bandwidth),))
    steady, rested = (exposure_of(found.program, play(found.program, cost_model(each))) for each in (cluster, bursts))
    assert [part[:2] for part in steady.parts] == [part[:2] for part in rested.parts]
    assert max(percent for *_, percent in steady.parts) > 50 and all(percent <= 5 for *_, percent in rested.parts)


def test_each_kind_of_collectives_has_its_price() -> None:
    cluster = resolve_cluster("h100-node")
    exposed = {GRADIENT: 0.25, "forward": 0.5, PARAMETER: 0.0}
    whole, prices = PlacementCosts(cluster, (0, 1)), PlacementCosts(cluster, (0, 1), exposed)
    nbytes, overhead = 1 << 24, cluster.device.collective_overhead
    assert prices.change(nbytes, P, R, fused=True) == pytest.approx(whole.change(nbytes, P, R, fused=True) / 4)
    assert prices.change(nbytes, P, R) == whole.change(nbytes, P, R) == prices.of("backward").change(nbytes, P, R)
    half = prices.of("forward").change(nbytes, P, R) - overhead
    assert half == pytest.approx((whole.change(nbytes, P, R) - overhead) / 2)
    assert prices.of(PARAMETER).change(nbytes, S(0), R, fused=True) == 0.0


def test_a_level_has_its_gathers_in_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole parameter: a level-3 step gathers it twice, and updates rows alone, for which its gradient is read."""
    x = torch.empty(4, 512)
    program, axis = caught(nn.Sequential(nn.Linear(512, 512, bias=False)), x, x, monkeypatch)
    cluster = resolve_cluster("h100-node")

    def seconds(level: int) -> tuple[float, float]:
        """Of the parameter when it is whole, and when its rows are divided."""
        program.config = program.config.with_level(level)
        problem = LayoutProblem(program, [axis], [PlacementCosts(cluster, (0, 1))], cluster.device)
        number = problem.parameters["0.weight"]
        states = {each.outputs[0][0]: at for at, each in enumerate(problem.states[number])}
        read = [each.inputs[0][0] for each in problem.states[number]]
        assert read == [S(0) if placement == R and level else placement for placement in states]
        costs = problem.graph.unary[number]
        return costs[states[R]], costs[states[S(0)]]

    gather = PlacementCosts(cluster, (0, 1)).change(512 * 512 * 4, S(0), R, fused=True)
    off, divided = seconds(0)
    assert divided == pytest.approx(off / 2)
    for level, gathers in ((1, 1), (2, 1), (3, 2)):
        assert seconds(level) == (pytest.approx(divided + gathers * gather), divided)


def test_gathers_of_parameters_have_a_price_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They can be sent before anything is computed, so a schedule hides them where it hides no other gather."""
    layer, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.empty(64, 64)
    program, axis = caught(layer, x, x, monkeypatch)
    monkeypatch.undo()
    cluster = resolve_cluster("h100-node")
    bound = {}
    for exposed in ({}, {PARAMETER: 0.0}, {"forward": 0.0}):
        prices = [PlacementCosts(cluster, (0, 1), exposed)]
        problem = LayoutProblem(
            program, [replace(axis, parameters={"0.weight": Pin(S(0), "")})], prices, cluster.device
        )
        weight, op = problem.parameters["0.weight"], problem.named["0/t.0"]
        whole = next(at for at, state in enumerate(problem.states[op]) if state.inputs == ((R,),))
        bound[str(exposed)] = problem.graph.pairs[weight, op][0, whole]
    free, *counted = bound[str({PARAMETER: 0.0})], bound["{}"], bound[str({"forward": 0.0})]
    assert free == cluster.device.collective_overhead < counted[0] == counted[1]

    rows = {"0/t.0": State((R,), (R,)), "0/mm.0": State((S(0),), (S(0), R))}
    file = tmp_path / "strategies.json"
    file.write_text(Strategies(mesh={"dp": 2}, axes={"dp": Decisions({"0.weight": S(0)}, rows, (1,))}).to_json())
    found = lowered(layer, F.mse_loss, x, x, device_num=2, strategy_ckpt_load_file=file)
    gathers = [each.members for each in found.collectives if each.kind == "all_gather"]
    roles = {info(node).collective.role for node in found.program.collectives() if "gather" in info(node).name}
    assert gathers == [["0.weight"]] and roles == {"parameter"}
