"""Passes that are switched off by name: `skip_passes=` and COMMFUSE_SKIP."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import MLP_CASE

SKIPPABLE = [each.name for passes in TABLE.values() for each in passes if each.numerics != "defines"]
OPTIMAL = {"allreduce": {"mode": "optimal", "config": None}}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": cf.ScheduleConfig(across_steps=True), "comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"level": 2, "parallel_optimizer_threshold": 0}},
    {"backend": "inductor"},
    {"parallel_mode": "auto", "cluster": "gloo-1gbit"},
)
NEEDED = {"simplify", "fuse_collectives", "flatten_storage", "lower_average", "overlap"}
"""Passes without which others of these pipelines do not run."""
NOT_IN_THESE = {
    "cast_before_gather",
    "vote_first",
    "resend_rows",
    "postpone_gradients",
    "issue_by_need",
    "across_steps",
}


def compiled(**options: Any) -> tuple[torch.nn.Module, Any]:
    model = MLP_CASE.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, cf.compile(model, loss_fn=MLP_CASE.loss_fn, optimizer=optimizer, device_num=2, **options)


def names(lowered: Any) -> list[str]:
    return [record.name for record in lowered.pass_records]


@cache
def plain(number: int) -> Any:
    return compiled(**OPTIONS[number])[1].lower(*MLP_CASE.batches(1)[0])


@cache
def trained(number: int, skipped: tuple[str, ...] = ()) -> list[torch.Tensor]:
    model, step = compiled(**OPTIONS[number], skip_passes=skipped)
    world = LockstepWorld(step)
    for batch in (MLP_CASE.batches(2), MLP_CASE.batches(4)[2:]):
        world(batch)
    step.synchronize()
    return list(model.parameters())


@pytest.mark.parametrize("name", SKIPPABLE)
def test_a_skipped_pass_does_not_run_and_numbers_stay(name: str) -> None:
    number = next((number for number in range(len(OPTIONS)) if name in names(plain(number))), None)
    assert (number is None) is (name in NOT_IN_THESE)
    if number is None:
        return
    step = compiled(**OPTIONS[number], skip_passes=[name])[1]
    if name in NEEDED:
        with pytest.raises(ConfigValueError, match=rf"^skip_passes=\('{name}',\): pass \w+ requires "):
            step.lower(*MLP_CASE.batches(1)[0])
        return
    lowered = step.lower(*MLP_CASE.batches(1)[0])
    assert name not in names(lowered)
    assert f"\n# skip_passes: {name}\n" in lowered.text()
    assert lowered.fingerprint != plain(number).fingerprint
    assert f"  {name}: skip_passes or COMMFUSE_SKIP names it\n" in lowered.explain().text()
    if not {"backend", "parallel_mode"} & OPTIONS[number].keys():
        for one, two in zip(trained(number), trained(number, (name,)), strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("overlap", ConfigTypeError, 'give a tuple of names of passes, such as ("overlap",)'),
        ((3,), ConfigTypeError, "skip_passes holds 3; give names of passes"),
        (("overlapp",), ConfigValueError, "has 'overlapp', which is no pass; give some of simplify, "),
        (("reduce_gradients",), ConfigValueError, "has 'reduce_gradients', which says what is computed; give some of "),
    ],
)
def test_what_cannot_be_skipped_is_refused(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        compiled(skip_passes=given)
    assert text in str(raised.value)


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = MLP_CASE.batches(1)[0]
    monkeypatch.setenv("COMMFUSE_SKIP", "stream_buckets, merge_equal,")
    lowered = compiled()[1].lower(*batch)
    assert "\n# skip_passes: merge_equal,stream_buckets\n" in lowered.text()
    assert compiled(skip_passes=())[1].lower(*batch).program.config.skip_passes == ()
    assert from_json(lowered.to_json()).config.skip_passes == ("merge_equal", "stream_buckets")
    monkeypatch.setenv("COMMFUSE_SKIP", "no_pass")
    with pytest.raises(ConfigValueError, match="COMMFUSE_SKIP"):
        compiled()


def test_timings_list_the_passes_that_changed_the_graph() -> None:
    lowered = compiled()[1].lower(*MLP_CASE.batches(1)[0])
    explanation = lowered.explain(timings=True)
    assert [each.name for each in explanation.passes] == [each.name for each in lowered.pass_records if each.modified]
    lines = explanation.text().partition("passes that changed the graph\n")[2].splitlines()
    assert len(lines) == len(explanation.passes) > 3
    assert next(line for line in lines if "reduce_gradients" in line).endswith(" nodes")
    assert "passes that changed" not in lowered.explain().text()
