"""`lower()` of a model that Dynamo cuts: what the graphs are, on devices and in a virtual world."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx import cli, testing

FACTORY = "tests.frontends.test_lower_of_dynamo:factory"


class Gated(nn.Module):
    """Two graphs, of which values choose the second, and a part that stays with Python. All of it leaves traces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.python = nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.norm(self.first(x)), 0.2)
        if h.norm() > 1e-3:
            h = h * random.random()
        self.mean = self.mean * 0.5 + h.detach().mean(0)
        out: torch.Tensor = self.second(h) + self.by_python(h)
        return out

    @torch._dynamo.disable
    def by_python(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.python.weight.mul_(2)
        out: torch.Tensor = self.python(h)
        return out


class Sends(nn.Module):
    """Calls a collective at a graph break, or in a graph."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.linear(x))


def in_the_graph(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.commfuse.all_reduce(x, "sum", 2, "", 0)
    return out


def factory() -> tuple[Any, ...]:
    return Gated(), None, None, torch.ones(5, 4)


def lowered(model: nn.Module | None = None, **options: Any) -> cf.LoweredGraphs:
    torch._dynamo.reset()
    call: Any = cf.compile(Gated() if model is None else model, capture="dynamo", **options)
    found: cf.LoweredGraphs = call.lower(torch.ones(5, 4))
    return found


def members(graph: cf.Lowered) -> list[str]:
    return sorted(name for each in graph.collectives if each.kind == "all_reduce" for name in each.members)


@pytest.mark.parametrize("sums", [False, True])
def test_a_virtual_world(tmp_path: Path, sums: bool) -> None:
    found = lowered(device_num=8, global_rank=3, gradients_mean=not sums)
    first, second, late = found.graphs
    assert members(first) == ["first.bias", "first.weight", "norm.bias", "norm.weight"]
    assert members(second) == ["second.bias", "second.weight"]
    assert members(late) == ["python.bias", "python.weight"] and found.late == (late,)
    assert {each.group for each in found.collectives} == {tuple(range(8))}
    assert len(found.collectives) == sum(len(graph.collectives) for graph in found.graphs)
    assert [each.step_seconds > 0 for each in found.simulate("gloo-1gbit")] == [True] * 3
    assert found.text().startswith("== graph-00 ==\n") and "== late-00 ==" in found.text()
    assert "2 compiled graph(s)" in found.explain().text()
    again = lowered(device_num=8, global_rank=3, gradients_mean=not sums)
    assert again.fingerprint == found.fingerprint != lowered(device_num=4).fingerprint
    assert found.dump(tmp_path) == tmp_path
    assert cf.load(tmp_path / "graph-01").fingerprint == second.fingerprint
    assert cf.diff(tmp_path / "late-00", late).is_same


def test_every_graph_is_dumped_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_DUMP", str(tmp_path))
    found = lowered(device_num=2)
    assert [cf.load(folder).fingerprint for folder in sorted(tmp_path.iterdir())] == [
        graph.fingerprint for graph in found.graphs
    ]


def test_what_ranks_of_other_ways_reduce_is_named() -> None:
    explained = lowered(device_num=2, find_unused_parameters=True).explain().text()
    assert "reduces first.weight and 7 other(s), and by how many ranks each was used, in 1 all_reduce(s)" in explained


def test_a_virtual_world_runs_nothing() -> None:
    call = cf.compile(Gated(), capture="dynamo", device_num=8)
    with pytest.raises(cf.VirtualWorldError, match=r"device_num=8.*lower\(\) works"):
        call(torch.ones(5, 4))


def test_nothing_has_changed_afterwards() -> None:
    model = Gated()
    before, mean, state = copy.deepcopy(model.state_dict()), model.mean, torch.get_rng_state()
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    of_python = random.getstate()
    out = model.second(torch.ones(2, 8)).sum()
    lowered(model)
    assert model.mean is mean and random.getstate() == of_python and torch.equal(torch.get_rng_state(), state)
    assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(param.grad is None for param in model.parameters())
    out.backward()  # what autograd has saved is still right


def test_a_call_runs_what_was_lowered() -> None:
    torch._dynamo.reset()
    call: Any = cf.compile(Gated(), capture="dynamo")
    found = call.lower(torch.ones(5, 4))
    call(torch.ones(5, 4)).sum().backward()
    assert [graph.fingerprint for graph in call.graphs] == [graph.fingerprint for graph in found.graphs]


def test_one_graph_is_a_lowered() -> None:
    found: Any = lowered(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), device_num=2)
    assert isinstance(found, cf.Lowered) and found.graphs == [found]
    testing.assert_collectives(found, all_reduce=1)


def test_several_graphs_where_one_is_wanted() -> None:
    found: Any = lowered()
    with pytest.raises(cf.ConfigTypeError, match=r"2 graphs \(graph-00, graph-01\).*lowered.graphs\[0\]"):
        testing.assert_collectives(found, all_reduce=1)
    with pytest.raises(cf.ConfigTypeError, match=r"a is what lower\(\) returns.*a.graphs\[0\]"):
        cf.diff(found, found)


@pytest.mark.parametrize("call", [cf.ops.all_reduce, in_the_graph])
def test_collectives_of_the_model_are_refused(call: Any) -> None:
    # Whether Dynamo looks into a function of this package depends on the version of torch.
    with pytest.raises(cf.NotAvailableError, match=r"calls (cf\.ops|commfuse)\.all_reduce: .*attribute graphs"):
        lowered(Sends(call), device_num=2)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    given = ["lower", FACTORY, "--set", 'capture="dynamo"']
    assert cli.main([*given, "--dump", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.main([*given, "--collectives"]) == 0
    assert "python.weight" in capsys.readouterr().out
    assert cli.main(["explain", FACTORY, "--set", 'capture="dynamo"']) == 2
    assert "DIR/graph-00" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path / "graph-00")]) == 0
    assert "bucket" in capsys.readouterr().out


class Normed(nn.Module):
    """Gradients become ready in another order than they are sent: that of `scale` is a bucket of its own, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.scale, self.heads = nn.Parameter(torch.ones(4)), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.layers(x) * self.scale
        return [head(h) for head in self.heads]


@pytest.mark.parametrize("cuts", [[1], [2, 5], [9, 11], None])
def test_a_graph_for_any_size_sends_buffers_where_one_for_a_size_does(cuts: list[int] | None) -> None:
    torch._dynamo.reset()
    fusion = {"openstate": False} if cuts is None else {"allreduce": {"mode": "index", "config": cuts}}
    compiled = cf.compile(Normed(), fusion, capture="dynamo", device_num=2)
    one, anything = compiled.lower(torch.randn(5, 4)), compiled.lower(torch.randn(6, 4))
    assert "computed by autograd" not in one.text() and "computed by autograd" in anything.text()
    listed = "skipped passes\n  merge_equal: it works on what is computed, and the graph is for any size\n"
    assert listed in anything.explain().text() and "skipped passes" not in one.explain().text()
    sent, sent_anyhow = ([(each.kind, each.members) for each in lowered.collectives] for lowered in (one, anything))
    assert sent == sent_anyhow and sent[0][0] == "broadcast"
