"""Graphs for any size, and graphs that cannot be traced, on one device: autograd runs them, with all their views."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.capture.dynamo.gradient_order import gradient_order
from commfuse_fx.dynamo import autograd_session
from commfuse_fx.ir.json.read import from_json
from tests.models import TwoLayers


class Views(TwoLayers):
    """Outputs of a graph share memory, in shapes that follow from sizes, and change when it has ended."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        rows, halves, columns = h.size(0), h.view(x.shape[0] * 2, 4), h.t()
        torch._dynamo.graph_break()
        halves.mul_(rows)
        torch._dynamo.graph_break()
        left, right = h[: rows // 2], h[rows // 2 :]
        torch._dynamo.graph_break()
        out: torch.Tensor = self.second(left).sum() + self.second(right).square().sum() + columns.sum() / rows
        return out


class Arguments(TwoLayers):
    """A graph returns its arguments and their sizes; another one changes them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        y, kept, rows = self.second(h * 1), h[1:], h.shape[0]
        torch._dynamo.graph_break()
        h *= 2
        h[0] = self.second.bias.sum()
        out: torch.Tensor = self.second(h * 1).sum()
        torch._dynamo.graph_break()
        return out + y.sum() * rows + (kept * 1).square().sum() + (h * 1).exp().sum()


class Branches(TwoLayers):
    """Python decides by a size, which Dynamo guards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * 3 if x.shape[0] > 5 else h) * x.shape[0]


class Rows(TwoLayers):
    """How many rows there are follows from values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x[x[:, 0] > 0])).square().sum()
        return out


def trains_as_eager(kind: type[nn.Module], sizes: tuple[int, ...]) -> Any:
    torch._dynamo.reset()
    model = kind()
    twin = copy.deepcopy(model)
    call = cf.compile(model, capture="dynamo", cpu_kernels=False)
    for rows in sizes:
        x = torch.randn(rows, 4)
        found = []
        for each, run in ((model, call), (twin, twin)):
            each.zero_grad()
            given = x.clone().requires_grad_()
            run(given).sum().backward()
            found.append((given.grad, [param.grad for param in each.parameters()]))
        torch.testing.assert_close(*found)
    return call


@pytest.mark.parametrize("kind", [Views, Arguments])
def test_views_of_any_size(kind: type[nn.Module]) -> None:
    call = trains_as_eager(kind, (5, 6, 8, 1, 3))
    explained = call.explain()
    assert any(graph.program.by_autograd for graph in explained.compiled)
    changing = ["it changes arguments that have a gradient, which autograd has to know"] * 3
    assert [each.reason for each in explained.as_they_are] == (changing if kind is Arguments else [])


def test_a_size_may_decide() -> None:
    call = trains_as_eager(Branches, (3, 4, 6, 8, 5, 2, 9))
    assert [bool(graph.program.by_autograd) for graph in call.graphs] == [False, True, True]


def test_sizes_that_follow_from_values() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = trains_as_eager(Rows, (8, 9, 12))
    known, for_any = (graph.program.by_autograd for graph in call.graphs)
    assert known.startswith("the graph cannot be traced [") and for_any == "the graph is for any size"


def test_a_forward_without_a_backward_lets_go_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()  # or collecting looks through what all tests before have left
    made: list[Any] = []

    class Recorded(autograd_session.Recorded):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(autograd_session, "Recorded", Recorded)
    call = trains_as_eager(Views, (5, 6))
    gc.collect()
    gc.disable()
    try:
        out = call(torch.randn(7, 4))
        assert any(each() is not None for each in made)
        del out
        assert all(each() is None for each in made)
    finally:
        gc.enable()


def test_what_is_saved_of_a_graph_for_any_size() -> None:
    *_, graph = [each for each in trains_as_eager(Views, (5, 6)).graphs if each.program.by_autograd]
    assert "# form: module, computed by autograd\n" in graph.text()
    assert from_json(graph.to_json()).by_autograd == "the graph is for any size"
    notes = [(note.topic, note.subject) for note in graph.program.notes]
    skipped = [("skipped passes", name) for name in ("merge_equal", "compute_once", "gradients_first")]
    assert notes == [("by autograd", "all ops"), *skipped]
    assert "predictions" in graph.explain().text()


def test_a_gradient_is_ready_behind_the_first_op_that_reads_the_parameter() -> None:
    graph = fx.Graph()
    x, weight, bias, last = map(graph.placeholder, ("x", "weight", "bias", "last"))
    h = graph.call_function(F.linear, (x, weight, bias))
    graph.output(graph.call_function(torch.matmul, (graph.call_function(torch.matmul, (h, last)), weight)))
    made = fx.GraphModule(nn.Module(), graph)
    assert gradient_order(made, (None, "weight", "bias", "last")) == ["last", "bias", "weight"]


class Dropped(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.first(x)), 0.3) @ self.first.weight


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointing_around_the_module(is_reentrant: bool) -> None:
    torch._dynamo.reset()
    model = Dropped()
    twin = copy.deepcopy(model)
    call = cf.compile(model, capture="dynamo", cpu_kernels=False)
    for rows in (3, 5, 6):
        found = []
        for run in (call, twin):
            run.zero_grad()
            torch.manual_seed(rows)
            x = torch.randn(rows, 4, requires_grad=True)
            checkpoint(lambda x, run=run: run(run(x)), x, use_reentrant=is_reentrant).square().sum().backward()
            found.append((x.grad, [param.grad for param in run.parameters()]))
        torch.testing.assert_close(*found)
    assert [bool(graph.program.by_autograd) for graph in call.graphs] == [False, True]


class Saved(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)).view(-1)


def test_outputs_that_the_backward_reads_may_not_change() -> None:
    torch._dynamo.reset()
    call = cf.compile(Saved(), capture="dynamo", cpu_kernels=False)
    for rows in (3, 5, 6):
        out = call(torch.randn(rows, 4))
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_graph_for_any_size_in_a_virtual_world() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(assume_static_by_default=False):
        found = cf.compile(Dropped(), capture="dynamo", device_num=8, global_rank=3).lower(torch.randn(3, 4))
    assert found.program.by_autograd == "the graph is for any size"
    assert [(each.kind, each.members) for each in found.collectives] == [("all_reduce", ["first.bias", "first.weight"])]
    skipped = [note.subject for note in found.program.notes if note.topic == "skipped passes"]
    assert "draw_masks" in skipped and "gradients_first" in skipped
