"""Parameters that real ranks keep divided: training, reading together, and reading alone."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import commfuse_fx as cf
from tests.distributed.harness import Ranks, hurry
from tests.sharding.elementwise import (
    ACROSS,
    ONE_AXIS,
    TWO_AXES,
    Layouts,
    assert_close,
    batch,
    eager,
    eager_step,
    make_step,
    values,
)

pytestmark = pytest.mark.dist


def train(mesh: tuple[int, ...], layouts: Layouts, optimizer: str, steps: int, **options: Any) -> Any:
    """Parameters and state after some steps, read once in between; whether everything was divided then."""
    step = make_step(layouts, mesh, optimizer, virtual=False, **options)
    divided = []
    for number in range(steps):
        step(batch(number, step.mesh.index("dp", cf.get_rank())))
        assert step.session.runners.executors.shards is not None and step.session.running is not None
        assert step.session.running.tail.is_pending == ("schedule" in options and mesh[0] > 1)
        divided.append(step.session.runners.executors.shards.is_divided)
        if number == 1:
            assert float(step.model.a.sum()) and not step.session.runners.executors.shards.is_divided
    return values(step.model, step.optimizer), divided


def reference(data: int, optimizer: str, steps: int) -> dict[str, torch.Tensor]:
    model, made = eager(optimizer)
    for number in range(steps):
        eager_step(model, made, [batch(number, rank) for rank in range(data)])
    return values(model, made)


@pytest.mark.parametrize(("mesh", "layouts"), [((2, 2), ONE_AXIS), ((1, 2, 2), TWO_AXES), ((1, 2), ONE_AXIS)], ids=str)
@pytest.mark.parametrize("options", [{}, ACROSS], ids=["", "across"])
def test_trains_as_one_device(ranks: Ranks, mesh: tuple[int, ...], layouts: Layouts, options: dict[str, Any]) -> None:
    size = torch.Size(mesh).numel()
    want = reference(mesh[0], "adamw", 4)
    for have, divided in ranks.values(_train_with, mesh, layouts, options, size=size):
        assert all(divided)
        assert_close(have, want)


def _train_with(mesh: Any, layouts: Any, options: dict[str, Any]) -> Any:
    return train(mesh, layouts, "adamw", 4, **options)


def resumed() -> dict[str, torch.Tensor]:
    """Saved by all ranks after two steps, loaded into a new model, and gone on with."""
    file = io.BytesIO()
    for part in (range(2), range(2, 4)):
        step = make_step(ONE_AXIS, (2, 2), virtual=False)
        assert step.optimizer is not None
        if part.start:
            file.seek(0)
            saved = torch.load(file)
            step.model.load_state_dict(saved["model"])
            step.optimizer.load_state_dict(saved["optimizer"])
        for number in part:
            step(batch(number, step.mesh.index("dp", cf.get_rank())))
        torch.save({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}, file)
    return values(step.model, step.optimizer)


def test_a_checkpoint_is_like_any_other(ranks: Ranks) -> None:
    want = reference(2, "adamw", 4)
    for have in ranks.values(resumed, size=4):
        assert_close(have, want)


def broadcast() -> dict[str, torch.Tensor]:
    """Ranks that begin with different parameters take those of rank 0, whole."""
    step = make_step(ONE_AXIS, (2, 2), virtual=False, parameter_broadcast=True)
    if cf.get_rank():
        with torch.no_grad():
            for param in step.model.parameters():
                param.add_(cf.get_rank())
    for number in range(2):
        step(batch(number, step.mesh.index("dp", cf.get_rank())))
    return values(step.model, step.optimizer)


def test_parameters_are_broadcast_whole(ranks: Ranks) -> None:
    want = reference(2, "adamw", 2)
    for have in ranks.values(broadcast, size=4):
        assert_close(have, want)


def read_alone() -> tuple[str, float, dict[str, torch.Tensor]]:
    """Rank 0 reads by itself and is refused; training goes on, and then all read."""
    step = make_step(ONE_AXIS, (2, 2), virtual=False)
    data = step.mesh.index("dp", cf.get_rank())
    step(batch(0, data))
    hurry(8.0)
    message, began = "", time.monotonic()
    if cf.get_rank() == 0:
        try:
            step.model.state_dict()["a"].sum()
        except cf.CollectiveError as error:
            message = str(error)
    waited = time.monotonic() - began
    step(batch(1, data))
    return message, waited, values(step.model, step.optimizer)


def test_reading_on_one_rank_does_not_hang(ranks: Ranks) -> None:
    first, *others = ranks.values(read_alone, size=4)
    message, waited, _ = first
    assert "step.state_dict() on every rank, then save on one" in message
    assert 3.0 < waited < 7.0
    assert not any(text for text, _, _ in others)
    for _, _, have in (first, *others):
        assert_close(have, reference(2, "adamw", 2))


def come_late() -> tuple[str, bool]:
    """Rank 1 reads when the others have given up, once too early and once too late."""
    step = make_step(ONE_AXIS, (2, 2), virtual=False)
    data = step.mesh.index("dp", cf.get_rank())
    step(batch(0, data))
    hurry(4.0)
    message = ""
    if cf.get_rank() == 1:
        time.sleep(3.0)
    try:
        step.model.a.sum()
    except cf.CollectiveError as error:
        message = str(error)
    return message, bool(step.model.a.sum().isfinite())  # now all are there


def test_a_rank_that_comes_too_late_is_told(ranks: Ranks) -> None:
    for message, readable in ranks.values(come_late, size=4):
        assert "by all ranks together" in message
        assert readable


def failing() -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One rank fails before the ranks have agreed on a step: it has not happened, and all can read and go on."""
    step = make_step(ONE_AXIS, (2, 2), virtual=False)
    data = step.mesh.index("dp", cf.get_rank())
    step(batch(0, data))
    step.model.a.sum()  # whole again: now a rank that fails has not divided it, and the others must not either
    message = ""
    try:
        step("no tensor" if cf.get_rank() == 2 else batch(1, data))
    except Exception as error:
        message = type(error).__name__
    first = values(step.model, step.optimizer)
    step(batch(1, data))
    return message, first, values(step.model, step.optimizer)


def test_a_step_that_fails_on_one_rank(ranks: Ranks) -> None:
    for message, first, second in ranks.values(failing, size=4):
        assert message
        assert_close(first, reference(2, "adamw", 1))
        assert_close(second, reference(2, "adamw", 2))


def lower_on_one_rank() -> str:
    step = make_step(ONE_AXIS, (2, 2), virtual=False)
    step(batch(0, step.mesh.index("dp", cf.get_rank())))
    text = step.lower(batch(0, 0)[:2]).text() if cf.get_rank() == 0 else ""
    assert step.session.runners.executors.shards is not None and step.session.runners.executors.shards.is_divided
    step.model.c.sum()
    return text


def test_lowering_does_not_gather(ranks: Ranks) -> None:
    first, *_ = ranks.values(lower_on_one_rank, size=4)
    assert "all_reduce" in first


def profiled() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values before and after a profile in the middle of training, and after one more step."""
    step = make_step(ONE_AXIS, (2, 2), virtual=False)
    data = step.mesh.index("dp", cf.get_rank())
    step(batch(0, data))
    before = values(step.model, step.optimizer)
    assert step.profile(batch(1, data), rounds=1).node_seconds
    after = values(step.model, step.optimizer)
    step(batch(1, data))
    return before, after, values(step.model, step.optimizer)


def test_profiling_leaves_everything_as_it_was(ranks: Ranks) -> None:
    for before, after, end in ranks.values(profiled, size=4):
        assert_close(after, before)
        assert_close(end, reference(2, "adamw", 2))


def read_in_threads() -> tuple[list[str], dict[str, torch.Tensor]]:
    """Two threads of every rank read at once: the parts are gathered once."""
    errors: list[str] = []
    step = make_step(ONE_AXIS, (1, 2), virtual=False)

    def read(param: torch.Tensor) -> None:
        try:
            param.sum()
        except Exception as error:
            errors.append(repr(error))

    for number in range(4):
        step(batch(number, 0))
        threads = [threading.Thread(target=read, args=(param,)) for param in (step.model.a, step.model.b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return errors, values(step.model, step.optimizer)


def read_in_a_fake_world() -> tuple[list[str], dict[str, torch.Tensor]]:
    step = make_step(ONE_AXIS, (1, 2), virtual=False)
    for number in range(4):
        step(batch(number, 0))
        with FakeTensorMode(allow_non_fake_inputs=True):
            step.model.a.sum()
    return [], values(step.model, step.optimizer)


@pytest.mark.parametrize("read", [read_in_threads, read_in_a_fake_world])
def test_whoever_reads_gathers_the_real_parts_once(ranks: Ranks, read: Any) -> None:
    want = reference(1, "adamw", 4)
    for errors, have in ranks.values(read):
        assert errors == []
        assert_close(have, want)
