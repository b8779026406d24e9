"""A search of strategies shows how far it is, and Ctrl-C takes the best plan so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import cost_model
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.passes.fuse.fuse_collectives import FuseCollectives
from commfuse_fx.planning import planner
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.simulate.simulation import simulate


def step_of(**options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"parallel_mode": "auto", "device_num": 4, "cluster": "gloo-1gbit", **options}
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options), torch.empty(8, 64)


def lowered(**options: Any) -> Any:
    step, x = step_of(**options)
    return step.lower(x, x)


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, of: Any = Divide) -> list[int]:
    """Ctrl-C in a plan, given by its number."""
    calls: list[int] = []
    run = of.__call__

    def count(self: Any, *arguments: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == at:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(of, "__call__", count)
    return calls


def test_the_best_plan_so_far_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    whole = lowered()
    calls = interrupted(monkeypatch, 3)
    found = lowered()
    reason = next(note.reason for note in found.explain().notes if note.subject == "interrupted")
    assert calls == [1, 2, 3] and reason.startswith("planning ended after 2 of at most ")
    assert f"interrupted: {reason}" in caplog.text
    assert "interrupted" in found.explain().text() and "interrupted" not in whole.explain().text()
    assert whole.simulate().step_seconds <= found.simulate().step_seconds


def test_before_there_is_a_plan_it_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        lowered()


def test_the_second_one_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 2)

    def again(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Divide, "keep_notes", again)
    with pytest.raises(KeyboardInterrupt):
        lowered()


def test_real_ranks_do_not_come_to_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = step_of()
    compiled = step.planner.read(step.planner.take_apart((x, x), {}))
    real = replace(step.config, device_num=None, global_rank=None)
    interrupted(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        plan_step(compiled.captured.copy(), real, compiled.asked)


def test_where_nothing_is_searched_it_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = interrupted(monkeypatch, 2, FuseCollectives)
    optimal = {"allreduce": {"mode": "optimal", "config": None}}
    with pytest.raises(KeyboardInterrupt):
        lowered(parallel_mode="data_parallel", comm_fusion=optimal)
    assert calls == [1, 2]


def test_a_line_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    @contextmanager
    def progress(what: str) -> Iterator[Callable[[str], None]]:
        yield lines.append

    monkeypatch.setattr(planner, "progress", progress)
    step, x = step_of()
    seconds: list[float] = []
    step.planner.on_plan = lambda made: seconds.append(made.seconds)
    step.lower(x, x)
    best = [min(seconds[: number + 1]) for number in range(len(seconds))]
    texts = [f"best so far {each * 1e3:.3f} ms" for each in best]
    assert len(lines) >= 2 and all(text in line for text, line in zip(texts, lines, strict=False))
    assert [line.split(",")[0].rpartition(" ")[0] for line in lines[:2]] == [
        f"compiling the training step: plan {number} of at most" for number in (2, 3)
    ]


def test_plans_are_told_with_what_they_take() -> None:
    step, x = step_of()
    made: list[Any] = []
    step.planner.on_plan = made.append
    found = step.lower(x, x)
    assert [each.number for each in made] == list(range(1, len(made) + 1)) and len(made) <= made[0].most
    costs = cost_model(step.config.cluster)
    assert min(each.seconds for each in made) == pytest.approx(found.simulate().step_seconds)
    assert all(simulate(each.program, costs).step_seconds == pytest.approx(each.seconds) for each in made)
