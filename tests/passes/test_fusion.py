"""Which gradients end up in which bucket: tables of (sizes, dtypes, configuration) -> members, on compiled models."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.ir.core.verify import verify

MIB = 2**20


class Parameters(nn.Module):
    """One parameter per (elements, dtype), used in order, so gradients become ready in reverse order: pN, ..., p0."""

    def __init__(self, *sizes: tuple[int, torch.dtype]) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.p:
            x = torch.tanh(x) * param.sum().to(x.dtype)
        return x.sum()


def f32(*mib: float) -> list[tuple[int, torch.dtype]]:
    return [(int(size * MIB / 4), torch.float32) for size in mib]


def lower(model: nn.Module, comm_fusion: Any = None, **options: Any) -> cf.Lowered:
    options.setdefault("device_num", 2)
    return cf.compile(model, comm_fusion, **options, form="step").lower(torch.ones(3))


def buckets(model: nn.Module, comm_fusion: Any = None, **options: Any) -> list[list[str]]:
    """Members of each collective without the `p.` in front, in issue order."""
    lowered = lower(model, comm_fusion, **options)
    return [[name.removeprefix("p.") for name in each.members] for each in lowered.collectives]


def size(mib: int) -> dict[str, Any]:
    return {"allreduce": {"mode": "size", "config": mib}}


def index(*cuts: int) -> dict[str, Any]:
    return {"allreduce": {"mode": "index", "config": list(cuts)}}


@pytest.mark.parametrize(
    ("sizes", "config", "expected"),
    [
        (f32(1, 1, 1), None, [["2", "1", "0"]]),
        (f32(30, 30, 30), None, [["2", "1"], ["0"]]),
        (f32(32, 32), None, [["1", "0"]]),
        (f32(32, 32.001), None, [["1"], ["0"]]),
        (f32(65, 1, 1), None, [["2", "1"], ["0"]]),
        (f32(1, 65, 1), None, [["2"], ["1"], ["0"]]),
        (f32(1, 1, 1), size(1), [["2"], ["1"], ["0"]]),
        (f32(0.5, 0.5, 1), size(1), [["2"], ["1", "0"]]),
        (f32(0.25, 0.5, 0.25, 0.5), size(1), [["3", "2"], ["1", "0"]]),
        (f32(0.3, 0.3, 0.3, 0.3), size(1), [["3", "2", "1"], ["0"]]),
        (f32(2, 0.5, 0.5), size(1), [["2", "1"], ["0"]]),
        (f32(1, 1, 1), {"openstate": False}, [["2"], ["1"], ["0"]]),
        (f32(1, 1, 1), {**size(64), "openstate": False}, [["2"], ["1"], ["0"]]),
        (f32(1, 1, 1, 1), index(2), [["3", "2"], ["1", "0"]]),
        (f32(1, 1, 1, 1), index(1, 3), [["3"], ["2", "1"], ["0"]]),
        (f32(99, 99, 99), index(1), [["2", "1"], ["0"]]),
    ],
)
def test_members_by_mode(sizes: Any, config: Any, expected: list[list[str]]) -> None:
    assert buckets(Parameters(*sizes), config) == expected


def test_21_gradients_with_index_20_give_20_and_1() -> None:
    found = buckets(Parameters(*f32(*[0.01] * 21)), index(20))
    assert [len(members) for members in found] == [1, 20]
    assert found[0] == ["20"]


def test_all_reduce_fusion_config_of_the_context_is_the_index_mode() -> None:
    cf.set_auto_parallel_context(all_reduce_fusion_config=[2])
    assert buckets(Parameters(*f32(1, 1, 1, 1))) == [["3", "2"], ["1", "0"]]


def test_an_index_past_the_end_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="commfuse_fx"):
        lowered = lower(Parameters(*f32(1, 1)), index(1, 2, 7))
    assert [each.members for each in lowered.collectives] == [["p.1"], ["p.0"]]
    assert "2, 7" in caplog.text
    assert "ignored" in lowered.explain().text()


def test_sequence_numbers_count_parameters_that_require_gradients() -> None:
    model = Parameters(*f32(1, 1, 1, 1))
    model.p[0].requires_grad_(False)
    assert buckets(model, index(1)) == [["3", "2"], ["1"]]


def test_cuts_count_parameters_that_the_optimizer_does_not_hold(caplog: pytest.LogCaptureFixture) -> None:
    model = Parameters(*f32(1, 1, 1, 1))
    optimizer = torch.optim.SGD([model.p[2], model.p[3]], lr=0.1)
    with caplog.at_level(logging.WARNING, logger="commfuse_fx"):
        assert buckets(model, index(2), optimizer=optimizer) == [["3", "2"]]
        assert buckets(model, index(3), optimizer=optimizer) == [["3"], ["2"]]
    assert not caplog.text
    buckets(model, index(4), optimizer=optimizer)
    assert "index 4 is at or past" in caplog.text


def test_alternating_dtypes_give_one_bucket_per_dtype() -> None:
    sizes = [(64, torch.float32), (64, torch.float64)] * 4
    found = buckets(Parameters(*sizes))
    assert found == [["7", "5", "3", "1"], ["6", "4", "2", "0"]]


def test_low_precision_gradients_travel_in_fp32_and_join_fp32_ones() -> None:
    model = Parameters((64, torch.float32), (64, torch.bfloat16), (64, torch.float16))
    assert buckets(model) == [["2", "1", "0"]]
    (only,) = lower(model).collectives
    assert (only.dtype, only.bytes) == (torch.float32, 3 * 64 * 4)
    assert buckets(model, gradient_fp32_sync=False) == [["2"], ["1"], ["0"]]


def test_explicit_ids_win_over_the_mode_and_ignore_sizes() -> None:
    model = Parameters(*f32(1, 40, 1, 40, 1, 1))
    for number, fusion_id in {1: 5, 3: 5, 4: 0}.items():
        model.p[number].comm_fusion = fusion_id  # type: ignore[attr-defined]
    for config in (None, size(1), index(1)):
        found = lower(model, config).collectives
        ids = {tuple(each.members): each.fusion_id for each in found}
        assert ids["p.3", "p.1"] == 5
        assert ids["p.4",] == 0
    assert buckets(model) == [["4"], ["3", "1"], ["5", "2", "0"]]


def test_bytes_index_phase_and_group_of_a_collective() -> None:
    model = Parameters((10, torch.float32), (7, torch.float32))
    (only,) = lower(model, device_num=4, global_rank=3).collectives
    assert only.kind == "all_reduce"
    assert only.reduce_op == "sum"
    assert only.bytes == 17 * 4
    assert only.index == 0
    assert only.phase == "backward"
    assert only.group == (0, 1, 2, 3)
    assert only.fused


def test_a_parameter_used_twice_is_reduced_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x))).sum()

    found = lower(Shared(), {"openstate": False}).collectives
    assert sorted(each.members for each in found) == [["a.bias"], ["a.weight"], ["b.bias"]]


class Chains(nn.Module):
    """Two chains A -> B and C -> D of all_reduces written by the user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = cf.ops.all_reduce(x)
        b = cf.ops.all_reduce(torch.tanh(a))
        c = cf.ops.all_reduce(x * 2)
        d = cf.ops.all_reduce(torch.sin(c))
        return (b + d).sum()


def test_dependent_chains_give_two_nodes_and_the_reason() -> None:
    lowered = cf.compile(Chains().eval(), device_num=2, form="step").lower(torch.ones(3))
    assert [len(each.members) for each in lowered.collectives] == [2, 2]
    assert "depends on the first" in lowered.explain().text()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("config", "count"), [(None, 1), ({"openstate": False}, 2), (1, 1)])
def test_gathers_and_scatters_follow_their_mode(kind: str, config: Any, count: int) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            op = getattr(cf.ops, kind)
            return op(x).sum() + op(y).sum()

    if isinstance(config, int):
        config = {kind.replace("_", ""): {"mode": "size", "config": config}}
    lowered = cf.compile(Model().eval(), config, device_num=2, form="step").lower(torch.ones(4, 3), torch.ones(2, 5))
    found = lowered.collectives
    assert [each.kind for each in found] == [kind] * count
    # The full buffer: what an all_gather yields, what a reduce_scatter takes.
    full = {"all_gather": 2 * (12 + 10) * 4, "reduce_scatter": (12 + 10) * 4}[kind]
    assert sum(each.bytes for each in found) == full


def test_fusion_zero_on_an_op_is_never_fused() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = cf.ops.all_reduce(x, fusion=0) + cf.ops.all_reduce(x * 2, fusion=0)
            second = cf.ops.all_reduce(x * 3, fusion=7) + cf.ops.all_reduce(x * 4, fusion=7)
            return (first + second).sum()

    found = cf.compile(Model().eval(), device_num=2, form="step").lower(torch.ones(3)).collectives
    assert sorted((each.fusion_id, len(each.members)) for each in found) == [(0, 1), (0, 1), (7, 2)]


def test_no_collectives_on_one_device_or_stand_alone() -> None:
    model = Parameters(*f32(1, 1))
    assert buckets(model, device_num=1) == []
    assert buckets(model, parallel_mode="stand_alone") == []


# Mode "optimal".

OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}


def network(alpha: float, bandwidth: float) -> cf.ClusterSpec:
    device = cf.Device(
        name="core", flops={"f32": 1e12, "f64": 1e12}, memory_bandwidth=1e9, memory_bytes=2**40, op_overhead=1e-6
    )
    return cf.ClusterSpec(name="net", device=device, levels=(cf.Level(name="net", alpha=alpha, bandwidth=bandwidth),))


def test_optimal_merges_all_where_messages_cost_only_their_latency() -> None:
    model = Parameters(*f32(1, 1, 1, 1))
    assert buckets(model, OPTIMAL, cluster=network(1.0, 1e12)) == [["3", "2", "1", "0"]]


def test_optimal_sends_early_where_latency_is_nothing() -> None:
    model = Parameters(*f32(1, 1, 1, 1))
    found = buckets(model, OPTIMAL, cluster=network(0.0, 1e8))
    assert found[0] == ["3"]  # is on the wire while the next one is computed
    assert [name for members in found for name in members] == ["3", "2", "1", "0"]


def test_optimal_keeps_dtypes_apart_and_explicit_ids() -> None:
    sizes = [(MIB // 8, torch.float32), (MIB // 8, torch.float64)] * 3
    model = Parameters(*sizes)
    for number, fusion_id in {0: 0, 2: 9, 4: 9}.items():
        model.p[number].comm_fusion = fusion_id  # type: ignore[attr-defined]
    found = buckets(model, OPTIMAL, cluster=network(1.0, 1e12))
    assert sorted(found) == [["0"], ["4", "2"], ["5", "3", "1"]]


def test_optimal_with_the_switch_off_merges_nothing() -> None:
    model = Parameters(*f32(1, 1))
    assert buckets(model, {**OPTIMAL, "openstate": False}, cluster=network(1.0, 1e12)) == [["1"], ["0"]]


def test_the_cluster_of_the_mode_goes_before_that_of_the_call() -> None:
    model = Parameters(*f32(1, 1, 1, 1))
    given = {"allreduce": {"mode": "optimal", "config": network(1.0, 1e12)}}
    assert len(buckets(model, given, cluster=network(0.0, 1e8))) == 1


def test_optimal_leaves_what_depends_on_each_other_apart() -> None:
    step = cf.compile(Chains().eval(), OPTIMAL, device_num=2, cluster=network(1.0, 1e12), form="step")
    lowered = step.lower(torch.ones(3))
    sizes = [len(each.members) for each in lowered.collectives]
    assert sum(sizes) == 4
    assert 2 <= len(sizes) <= 3
    verify(lowered.program, "optimal fusion")


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("alpha", "count"), [(1.0, 1), (0.0, 2)])
def test_optimal_gathers_and_scatters(kind: str, alpha: float, count: int) -> None:
    """Used one after the other: together where a message costs its latency, else each in time for its own use."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            op = getattr(cf.ops, kind)
            first, second = op(x), op(y)
            z = first.sum()
            for _ in range(20):
                z = torch.sin(z)
            return z + second.sum()

    fusion = {kind.replace("_", ""): {"mode": "optimal", "config": None}}
    step = cf.compile(Model().eval(), fusion, device_num=2, cluster=network(alpha, 1e6), form="step")
    found = step.lower(torch.ones(64, 3), torch.ones(64, 5)).collectives
    assert [each.kind for each in found] == [kind] * count
