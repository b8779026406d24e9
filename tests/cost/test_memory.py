"""Memory of small graphs, counted by hand. A value of f32[4] has 16 bytes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.cost.memory import memory_profile, peak_memory
from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.meta import CollectiveInfo, TensorSpec, info
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Program
from tests.cost.graphs import Graph, aten, f32
from tests.models import WIDE


def by_name(program: Program) -> dict[str, int]:
    names = [info(node).name for node in program.graph.nodes]
    return dict(zip(names, memory_profile(program), strict=True))


def test_values_live_until_their_last_use() -> None:
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    b = g.op("b", a)
    c = g.op("c", b, x)
    d = g.op("d", c, a)
    program = g.program(d)
    # x is there always; a until d.
    assert by_name(program) == {"x": 16, "a": 32, "b": 48, "c": 64, "d": 64, "output": 32}
    assert peak_memory(program) == 64


@pytest.mark.parametrize("op", [aten.view.default, aten._unsafe_view.default])
def test_views_and_in_place_ops_share_memory(op: Any) -> None:
    g = Graph()
    x = g.input("x", f32(8))
    a = g.op("a", x, spec=f32(8))
    view = g.op("view", a, [4, 2], target=op, spec=f32(4, 2))
    changed = g.op("changed", view, view, target=aten.add_.Tensor, spec=f32(4, 2))
    small = g.op("small", changed, target=aten.sum.default, spec=f32())
    assert by_name(g.program(small)) == {"x": 32, "a": 64, "view": 64, "changed": 64, "small": 68, "output": 36}


def test_several_results_are_made_at_once_and_freed_one_by_one() -> None:
    g = Graph()
    x = g.input("x", f32(2, 4))
    norm = g.op("norm", x, [4], None, None, 1e-5, target=aten.native_layer_norm.default,
                spec=(f32(2, 4), f32(2, 1), f32(2, 1)))  # fmt: skip
    out = g.op("out", norm, 0, target=operator.getitem, spec=f32(2, 4))
    mean = g.op("mean", norm, 1, target=operator.getitem, spec=f32(2, 1))
    again = g.op("again", norm, 1, target=operator.getitem, spec=f32(2, 1))
    first = g.op("first", out, spec=f32(2, 4))
    last = g.op("last", mean, again, spec=f32(2, 1))
    total = g.op("total", first, last, spec=f32(2, 4))
    assert by_name(g.program(total)) == {
        "x": 32,
        "norm": 32 + 48,
        "out": 32 + 48,
        "mean": 32 + 48,
        "again": 32 + 48,  # the third result goes with the last of those that take the results apart
        "first": 32 + 40 + 32,
        "last": 32 + 8 + 32 + 8,
        "total": 32 + 32 + 8 + 32,
        "output": 32 + 32,
    }


def test_what_is_on_the_wire_lives_until_the_wait() -> None:
    g = Graph()
    x = g.input("x")
    shard = g.op("shard", x)
    details = CollectiveInfo("all_gather", "dp", torch.float32, 32, ("gather",), 0)
    gather = g.op("gather", shard, 2, "dp", target=c10d.all_gather_into_tensor.default, spec=f32(8), collective=details)
    beside = g.op("beside", x)
    whole = g.wait(gather)
    scaled = g.op("scaled", whole, whole, target=aten.add_.Tensor, spec=f32(8))
    end = g.op("end", scaled, beside, spec=f32(8))
    assert by_name(g.program(end)) == {
        "x": 16,
        "shard": 32,
        "gather": 32 + 32,
        "beside": 64 + 16,
        "gather.wait": 80,  # the shard is sent from until here
        "scaled": 64,
        "end": 64 + 32,
        "output": 16 + 32,
    }


def test_kept_memory_is_there_all_the_time() -> None:
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    storage = g.op("storage", [100], target=aten.empty.memory_format, spec=f32(100), kept=True)
    place = g.op("place", storage, [4], [1], 0, target=aten.as_strided.default)
    written = g.op("written", place, a, target=aten.copy_.default)
    end = g.op("end", written)
    assert by_name(g.program(end)) == {
        "x": 416,
        "a": 432,
        "storage": 432,
        "place": 432,
        "written": 432,
        "end": 432,
        "output": 432,
    }


def test_memory_that_the_next_step_uses_may_be_there_twice() -> None:
    g = Graph()
    x = g.input("x")
    first = g.op("first", x)
    value = g.op("value", x)
    second = g.op("second", first)
    loss = g.op("loss", second)
    g.op("late", x, value, target=aten.add_.Tensor, phase="update", next_step=second)
    # As run: first, value, late (with the value of the step before), second, loss.
    assert by_name(g.program(loss)) == {
        "x": 16 + 16,
        "first": 32 + 16,
        "value": 32 + 16 + 16,
        "late": 32 + 16 + 16,
        "second": 16 + 16 + 16 + 16,
        "loss": 16 + 16 + 16 + 16,
        "output": 16 + 16 + 16,
    }


def test_an_anchor_must_run_in_its_own_step() -> None:
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    one = g.op("one", x, a, target=aten.add_.Tensor, next_step=a)
    g.op("two", x, a, target=aten.add_.Tensor, next_step=one)
    with pytest.raises(VerificationError, match="two is to run in the next step before"):
        memory_profile(g.program(a))


def test_parameters_in_flat_storage_count_once() -> None:
    model = WIDE.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    step = cf.compile(model, loss_fn=WIDE.loss_fn, optimizer=optimizer, device_num=4, global_rank=0)
    batch = WIDE.batches(1, dtype=torch.float32)[0]
    program = step.lower(*batch).program
    elements = sum(param.numel() for param in model.parameters())
    profile = memory_profile(program)
    assert len(profile) == len(program.graph.nodes)
    # Parameters, two moments, and the bucket that is kept; little else in so small a batch.
    assert min(profile) >= 4 * 4 * elements + sum(value.nbytes for value in batch)
    assert peak_memory(program) < 1.2 * 4 * 4 * elements
    flat = [node for node in program.graph.nodes if node.op == "placeholder" and program.sources[node].kind == "flat"]
    assert flat and all(isinstance(info(node).spec, TensorSpec) for node in flat)


def test_what_a_compiled_region_keeps_in_registers_takes_no_memory() -> None:
    g = Graph()
    x = g.input("x")
    a = g.op("a", x)
    b = g.op("b", a)
    c = g.op("c", b, target=aten.sum.default, spec=f32())
    program = g.program(c)
    assert by_name(program) == {"x": 16, "a": 32, "b": 48, "c": 36, "output": 20}
    for node in (a, b, c):
        info(node).region = 0
    assert by_name(program) == {"x": 16, "a": 16, "b": 16, "c": 20, "output": 20}


def test_what_one_rank_owns_counts_as_on_the_average() -> None:
    g = Graph()
    x = g.input("x", f32(8))
    a = g.op("a", x, spec=f32(8))
    view = g.op("view", a, [8], target=aten.view.default, spec=f32(8))
    own = g.op("own", view, 1, 4, "dp", target=of_owner, spec=f32(8))
    b = g.op("b", x, spec=f32())
    last = g.op("last", own, b, spec=f32())
    given = g.op("given", x, 1, 4, "dp", target=of_owner, spec=f32(8))  # a part of an input takes nothing more
    total = g.op("total", last, given, spec=f32())
    assert by_name(g.program(total)) == {
        "x": 32,
        "a": 64,
        "view": 64,
        "own": 32 + 8,
        "b": 32 + 8 + 4,
        "last": 32 + 8 + 4 + 4,
        "given": 32 + 4,
        "total": 32 + 4 + 4,
        "output": 32 + 4,
    }
