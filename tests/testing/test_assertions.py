"""assert_collectives and assert_budget: what they accept, and what they say."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.machine.presets import preset
from commfuse_fx.testing import assert_budget, assert_collectives
from commfuse_fx.testing.budgets import wire_bytes

WEIGHT, BIAS = 4 * 8 * 8, 4 * 8
PAYLOAD = 3 * (WEIGHT + BIAS)


@cache
def lowered(ranks: int = 2) -> cf.Lowered:
    """Three layers, an all_reduce for each."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for number, layer in enumerate(model, 1):
        cf.set_comm_fusion(layer, number)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=sgd, device_num=ranks)
    return step.lower(torch.ones(4, 8), torch.ones(4, 8))


@cache
def divided() -> cf.Lowered:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    cf.shard(model[0], weight=("tp", None))
    cf.shard(model[2], weight=(None, "tp"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": sgd, "device_num": 4, "mesh": (2, 2)}
    return cf.compile(model, parallel_mode="semi_auto", **options, form="step").lower(
        torch.ones(4, 8), torch.ones(4, 8)
    )


@cache
def owned() -> cf.Lowered:
    """Two weights, each updated by one rank."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"mode": "broadcast", "parallel_optimizer_threshold": 0}
    options = {"device_num": 2, "enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    return cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=sgd, **options).lower(
        torch.ones(4, 8), torch.ones(4, 8)
    )


def said(check: Any, *arguments: Any, **options: Any) -> list[str]:
    """The lines of the AssertionError."""
    with pytest.raises(AssertionError) as raised:
        check(*arguments, **options)
    return str(raised.value).splitlines()


def test_what_holds_passes() -> None:
    assert_collectives(lowered(), all_reduce=3)
    assert_collectives(
        lowered(), all_reduce=3, all_gather=0, reduce_scatter=0, broadcast=0, all_to_all=0, reduce=0, total=3
    )
    assert_collectives(lowered(), max_bytes=PAYLOAD)
    assert_collectives(lowered(), total=3, phase="backward")
    assert_collectives(lowered(), total=0, phase="forward")
    assert_collectives(lowered(1), total=0, max_bytes=0)
    assert_collectives(owned(), reduce=2, broadcast=2, total=4)
    assert_collectives(owned(), reduce=2, total=2, phase="backward")


def test_reduces_are_counted() -> None:
    assert said(assert_collectives, owned(), reduce=1)[0] == "reduce: 2 found, 1 expected"


def test_wrong_counts_list_what_was_found() -> None:
    lines = said(assert_collectives, lowered(), all_reduce=2, all_gather=1, total=4, max_bytes=PAYLOAD - 1)
    assert lines == [
        "all_reduce: 3 found, 2 expected",
        "all_gather: 0 found, 1 expected",
        "collectives in total: 3 found, 4 expected",
        f"payload: {PAYLOAD} bytes found, at most {PAYLOAD - 1} expected",
        "3 collective(s) found:",
        "  all_reduce over 2 rank(s), 288 bytes of f32 in backward: 2.weight, 2.bias",
        "  all_reduce over 2 rank(s), 288 bytes of f32 in backward: 1.weight, 1.bias",
        "  all_reduce over 2 rank(s), 288 bytes of f32 in backward: 0.weight, 0.bias",
    ]


def test_a_phase_limits_what_counts() -> None:
    forward = [each for each in divided().collectives if each.phase == "forward"]
    assert 0 < len(forward) < len(divided().collectives)
    assert_collectives(divided(), total=len(forward), max_bytes=sum(each.bytes for each in forward), phase="forward")
    lines = said(assert_collectives, divided(), total=len(forward) + 1, phase="forward")
    assert lines[0] == f"collectives in total: {len(forward)} found, {len(forward) + 1} expected"
    assert lines[1] == f"{len(forward)} collective(s) found in phase forward:"
    assert len(lines) == 2 + len(forward)
    assert said(assert_collectives, lowered(), all_reduce=1, phase="forward") == [
        "all_reduce: 0 found, 1 expected",
        "0 collective(s) found in phase forward",
    ]


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "optimizer": sgd, "device_num": 2}
    alone = cf.compile(model, {"openstate": False}, **options, form="step").lower(torch.ones(2, 2), torch.ones(2, 2))
    lines = said(assert_collectives, alone, total=0)
    assert lines[:2] == ["collectives in total: 24 found, 0 expected", "24 collective(s) found:"]
    assert len(lines) == 2 + 20 + 1
    assert lines[-1] == "  ... and 4 more"
    together = cf.compile(model, **options, form="step").lower(torch.ones(2, 2), torch.ones(2, 2))
    assert said(assert_collectives, together, total=0)[-1].endswith(", ... 24")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, cf.ConfigValueError, "given nothing to expect; give all_reduce="),
        ({"phase": "forward"}, cf.ConfigValueError, "given nothing to expect"),
        ({"all_reduce": 1.0}, cf.ConfigTypeError, "all_reduce is 1.0; give an int >= 0"),
        ({"all_gather": True}, cf.ConfigTypeError, "all_gather is True; give an int >= 0"),
        ({"total": -1}, cf.ConfigValueError, "total is -1; give an int >= 0"),
        ({"max_bytes": "9"}, cf.ConfigTypeError, "max_bytes is '9'; give an int >= 0"),
        ({"total": 1, "phase": "warm-up"}, cf.ConfigValueError, "phase is 'warm-up', which is unknown; use one of"),
        ({"total": 1, "phase": 3}, cf.ConfigTypeError, "phase is 3; give one of"),
    ],
)
def test_bad_expectations(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assert_collectives(lowered(), **options)


@pytest.mark.parametrize("check", [assert_collectives, lambda value, **_: assert_budget(value, None, max_gap=1)])
def test_only_what_was_lowered(check: Any) -> None:
    with pytest.raises(cf.ConfigTypeError, match=r"lowered is 'text'; give what step.lower\(\*batch\) returns"):
        check("text", total=1)


def test_budgets_that_are_kept() -> None:
    step = lowered().simulate("gloo-1gbit")
    assert step.exposed_seconds > 0
    assert_budget(
        lowered(),
        "gloo-1gbit",
        max_exposed_seconds=step.exposed_seconds,
        max_wire_bytes=PAYLOAD,
        max_step_seconds=step.step_seconds,
        max_gap=step.gap,
    )
    assert_budget(lowered(1), None, max_exposed_seconds=0, max_wire_bytes=0)
    assert_budget(lowered(), preset("gloo-1gbit"), max_step_seconds=step.step_seconds)


def test_exceeded_budgets_name_figure_budget_and_cause() -> None:
    step = lowered().simulate("gloo-1gbit")
    lines = said(assert_budget, lowered(), "gloo-1gbit", max_exposed_seconds=1e-6, max_step_seconds=1e-6, max_gap=1e9)
    assert lines[0] == (
        f"exposed communication: {step.exposed_seconds * 1e3:.6g} ms, budget 0.001 ms (max_exposed_seconds)"
    )
    assert lines[1] == f"step time: {step.step_seconds * 1e3:.6g} ms, budget 0.001 ms (max_step_seconds)"
    assert lines[2] == "simulated on gloo-1gbit"
    exposed = sorted((each for each in step.collectives if each.exposed), key=lambda each: -each.exposed)
    assert lines[3] == f"{len(exposed)} of 3 collective(s) are exposed, the longest first:"
    assert len(lines) == 4 + 2 * len(exposed)
    for number, each in enumerate(exposed):
        assert each.reason
        assert lines[4 + 2 * number].startswith(f"  {each.name}: {each.exposed * 1e3:.6g} ms exposed")
        assert lines[4 + 2 * number].endswith(each.reason)
        assert lines[5 + 2 * number] == f"    {each.description}"


def test_a_step_that_exposes_nothing_says_so() -> None:
    lines = said(assert_budget, lowered(1), None, max_step_seconds=0)
    assert lines[0].endswith(", budget 0 ms (max_step_seconds)")
    assert lines[1:] == [
        "simulated on the cluster that the step was compiled for, or the default",
        "no collective is exposed",
    ]


def test_the_gap_names_the_bound() -> None:
    step = lowered().simulate("gloo-1gbit")
    (line, *_) = said(assert_budget, lowered(), "gloo-1gbit", max_gap=step.gap / 2)
    assert line.startswith("gap to the lower bound of ")
    assert step.bound_by in line
    assert f"{100 * step.gap:.4g} %, budget {50 * step.gap:.4g} % (max_gap)" in line


@pytest.mark.parametrize(("ranks", "share"), [(1, 0.0), (2, 1.0), (4, 1.5)])
def test_bytes_on_the_wire_of_an_all_reduce(ranks: int, share: float) -> None:
    assert wire_bytes(lowered(ranks).collectives) == share * PAYLOAD
    if ranks > 1:
        lines = said(assert_budget, lowered(ranks), "gloo-1gbit", max_wire_bytes=share * PAYLOAD - 1)
        want = (
            f"bytes on the wire: {share * PAYLOAD:.0f} bytes, budget {share * PAYLOAD - 1:.0f} bytes (max_wire_bytes)"
        )
        assert lines[0] == want
        assert lines[2:] == ["3 collective(s), the largest first:"] + 3 * [
            f"  all_reduce: {share * 288:.0f} bytes in backward"
        ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, cf.ConfigValueError, "given no budget; give at least one of max_exposed_seconds, max_wire_bytes"),
        ({"max_gap": "0.1"}, cf.ConfigTypeError, "max_gap is '0.1'; give a finite number >= 0"),
        ({"max_step_seconds": -1.0}, cf.ConfigValueError, "max_step_seconds is -1.0; give a finite number >= 0"),
        ({"max_exposed_seconds": float("nan")}, cf.ConfigValueError, "max_exposed_seconds is nan"),
        ({"max_wire_bytes": True}, cf.ConfigTypeError, "max_wire_bytes is True"),
    ],
)
def test_bad_budgets(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assert_budget(lowered(), "gloo-1gbit", **options)


def test_an_unknown_cluster_is_refused() -> None:
    with pytest.raises(cf.ConfigValueError, match="no-such-cluster.*is no preset"):
        assert_budget(lowered(), "no-such-cluster", max_gap=1)
