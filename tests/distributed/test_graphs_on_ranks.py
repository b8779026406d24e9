"""Ranks capture a step together or not at all, and what runs from the capture is what runs without one."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import assert_same, digest, snapshot, xy
from tests.distributed.programs import run_programs
from tests.logs import logged
from tests.recorders import CpuRecorder, CpuRecording, recorded


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.4), nn.ReLU(), nn.Linear(32, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)


class Rank:
    """The step of one rank, and its twin that is never captured."""

    def __init__(self, always: bool = False, **options: Any) -> None:
        self.model, self.twin = dropping(), dropping()
        self.optimizer, self.other = sgd(self.model), sgd(self.twin)
        self.step = cf.compile(self.model, loss_fn=F.cross_entropy, optimizer=self.optimizer, **options)
        self.plain = cf.compile(self.twin, loss_fn=F.cross_entropy, optimizer=self.other, cuda_graph=False, **options)
        self.recorder = recorded(self.step)
        graphs = self.step.session.graphs
        assert graphs is not None
        self.graphs = graphs
        self.graphs._always = always

    def call(self, number: int, rows: int = 4) -> float:
        """One step of both: the same loss, whatever the masks of dropout."""
        state = torch.get_rng_state()
        want = self.plain(*xy(number, rows=rows))
        torch.set_rng_state(state)
        loss = self.step(*xy(number, rows=rows))
        assert torch.equal(loss, want)
        return float(loss)

    def run(self, number: int, rows: int = 4) -> float:
        """As `call`, and the same parameters."""
        loss = self.call(number, rows)
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, self.twin.state_dict()[name]), name
        return loss

    @property
    def replays(self) -> list[int]:
        return self.recorder.replays


def captured_steps() -> tuple[list[int], list[float], str]:
    rank = Rank()
    torch.manual_seed(dist.get_rank())
    losses = [rank.run(number) for number in range(FIRST + 3)]
    return rank.replays, losses, digest(rank.model)


def test_masks_and_gradients_of_ranks(ranks: Ranks) -> None:
    (replays, one, model), (others, other, same) = ranks.values(captured_steps)
    assert replays == others == [3]
    assert len({*one, *other}) == 2 * (FIRST + 3)
    assert model == same


def captured_across_steps(always: bool) -> tuple[list[int], int]:
    """Steps that leave updates to the next one; some of them run between captured ones, without a capture."""
    schedule = cf.ScheduleConfig(across_steps=True)
    rank = Rank(always, schedule=schedule, comm_fusion={"openstate": False}, cluster="default")
    for number in range(FIRST + 1):
        rank.run(number)
    with rank.graphs.paused():
        rank.run(FIRST + 1)
        rank.call(FIRST + 2)
        running = rank.step.session.running
        assert running is not None and running.tail.is_pending
    rank.run(FIRST + 3)
    rank.run(FIRST + 4)
    assert not running.tail.is_pending or not always
    return rank.replays, len(running.tail.parts)


@pytest.mark.parametrize("always", [True, False])
def test_updates_across_steps(ranks: Ranks, always: bool) -> None:
    """A captured step completes them before it ends. Without being asked for, no such step is captured."""
    for replays, parts in ranks.values(captured_across_steps, always):
        assert parts > 2 and replays == ([FIRST + 2] if always else [])


def rates_across_steps() -> list[int]:
    """The rate changes while updates of a step without a capture are pending."""
    schedule = cf.ScheduleConfig(across_steps=True)
    rank = Rank(always=True, schedule=schedule, comm_fusion={"openstate": False}, cluster="default")
    groups = [each.param_groups[0] for each in (rank.optimizer, rank.other)]

    def halve() -> None:
        for group in groups:
            group["lr"] /= 2

    for number in range(FIRST + 2):
        rank.run(number)
        halve()
    for _ in range(2):
        with rank.graphs.paused():
            rank.call(9)
        halve()
        rank.call(10)
    rank.run(11)
    return rank.replays


def test_updates_across_steps_have_the_rate_of_their_step(ranks: Ranks) -> None:
    assert ranks.values(rates_across_steps) == [[FIRST + 4]] * 2


def one_rank_wishes_otherwise() -> tuple[list[int], list[bool]]:
    """Rank 1 gets another parameter tensor after the capture, so it cannot run from it; rank 0 could."""
    rank = Rank()
    for number in range(FIRST + 2):
        rank.run(number)
    if dist.get_rank() == 1:
        first: Any = rank.model[0]
        first.weight.data = first.weight.data.clone()
    for number in range(2 * FIRST + 1):
        rank.run(number)
    return rank.replays, [each.is_closed for each in rank.recorder.recordings]


def test_ranks_capture_together(ranks: Ranks) -> None:
    for replays, closed in ranks.values(one_rank_wishes_otherwise):
        assert replays == [2, 2] and closed == [True, False]


def other_rows_on_one_rank() -> list[int]:
    """Rank 1 has batches of another size in every second step: both ranks run these without a capture at first."""
    rank = Rank()
    for number in range(4 * FIRST + 2):
        rank.run(number, rows=4 + 2 * (dist.get_rank() * (number % 2)))
    return rank.replays


def test_ranks_with_batches_of_different_sizes(ranks: Ranks) -> None:
    one, other = ranks.values(other_rows_on_one_rank)
    assert sum(one) == sum(other) > 0


def one_capture_fails() -> tuple[list[int], str]:
    rank = Rank()
    if dist.get_rank() == 1:
        rank.recorder.error = RuntimeError("out of memory")
    for number in range(FIRST + 3):
        rank.run(number)
    return rank.replays, rank.graphs.ended


def test_a_failed_capture_ends_those_of_all_ranks(ranks: Ranks) -> None:
    (replays, ended), (others, failed) = ranks.values(one_capture_fails)
    assert replays == [0] and others == []
    assert ended == "another rank could not capture one"
    assert failed == "capturing one failed [RuntimeError: out of memory]"


def one_capture_fails_that_is_asked_for() -> str:
    rank = Rank(always=True)
    rank.run(0)
    if dist.get_rank() == 1:
        rank.recorder.error = RuntimeError("out of memory")
    before = snapshot(rank.model, rank.optimizer)
    try:
        rank.step(*xy(1))
    except cf.CommFuseError as error:
        assert_same(snapshot(rank.model, rank.optimizer), before)
        rank.recorder.error = None
        rank.run(1)
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_capture_that_is_asked_for_and_fails_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    one, other = run_soon(ranks, one_capture_fails_that_is_asked_for)
    assert one.value.startswith("PeerFailedError: ") and "rank 1: NotAvailableError: cuda_graph=True" in one.value
    assert other.value.startswith("NotAvailableError: cuda_graph=True: capturing the step failed")


class Hanging(CpuRecorder):
    """The second time that its recording runs, rank 1 leaves before the launch, and rank 0's device waits for it."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self.leave = leave
        self.device_runs: threading.Thread | None = None

    def record(self, compute: Any, generators: Any) -> CpuRecording:
        made = super().record(compute, generators)
        run = made.replay

        def replay() -> None:
            if made.replays == 0:
                run()
            elif dist.get_rank() == 1:
                self.leave()
            else:
                self.device_runs = threading.Thread(target=_quietly(run), daemon=True)
                self.device_runs.start()

        made.replay = replay
        return made

    def mark(self) -> Callable[[], bool]:
        return lambda: self.device_runs is None or not self.device_runs.is_alive()


def _quietly(run: Callable[[], None]) -> Callable[[], None]:
    def quiet() -> None:
        with suppress(RuntimeError):
            run()

    return quiet


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no launch")


def a_rank_leaves(leave: Callable[[], None]) -> list[str]:
    """The errors of the step that fails, of the next one, and of closing the step."""
    model = dropping()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=sgd(model))
    recorder = Hanging(leave)
    step.session.capture_with(recorder)
    for number in range(FIRST + 1):
        step(*xy(number))
    errors = []
    graphs = step.session.graphs
    assert graphs is not None and graphs.watch is not None
    for call in (lambda: step(*xy(8)), lambda: step(*xy(9)), step.close):
        try:
            call()
        except (cf.CommFuseError, ValueError) as caught:
            errors.append(f"{type(caught).__name__}: {caught}")
        while not (graphs.watch.lost or recorder.mark()()):
            time.sleep(0.01)
    return errors


@pytest.mark.parametrize("leave", [fail, kill], ids=lambda leave: leave.__name__)
def test_a_rank_that_leaves_between_vote_and_launch(ranks: Ranks, leave: Callable[[], None]) -> None:
    """The launch of the other rank returns, as the host does not wait for its device. The watch or the vote finds out.

    Gloo notices by itself that a rank was killed, which NCCL does not.
    """
    one, other = run_soon(ranks, a_rank_leaves, leave)
    assert one.value and all(error.startswith("CollectiveError: rank 0: ") for error in one.value)
    if leave is kill:
        assert other.died is not None
    else:
        assert len(one.value) == 2 and "left the step: rank 1: ValueError: no launch" in one.value[0]
        assert other.value[0] == "ValueError: no launch"
        assert other.value[1].startswith("CollectiveError: rank 1: an earlier step")


def ends_with_a_live_step() -> tuple[bool, bool]:
    rank = Rank()
    for number in range(FIRST + 1):
        rank.run(number)
    (recording,) = rank.recorder.recordings
    before = recording.is_closed
    dist.destroy_process_group()
    return before, recording.is_closed


def test_captures_go_before_the_process_groups(ranks: Ranks) -> None:
    assert ranks.values(ends_with_a_live_step) == [(False, True)] * 2


def trains_to_the_end(how: str) -> None:
    cf.init()
    rank = Rank()
    for number in range(FIRST + 2):
        rank.run(number)
    print("ran", rank.replays)
    if how == "close":
        rank.step.close()
    if how != "live":
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["live", "destroy", "close"])
def test_how_programs_end(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """With a captured step that is live or closed: soon, and without a word on stderr."""
    for ended in run_programs(ranks, trains_to_the_end, how, files=tmp_path, folder=tmp_path):
        own = [line for line in ended.err.splitlines() if not re.match(r"nanobind: |See https://nanobind| - ", line)]
        assert (ended.code, ended.out, own) == (0, "ran [2]\n", [])  # Triton of PyTorch 2.15 tells of leaks of its own


def closes_a_step() -> str:
    rank = Rank()
    for number in range(FIRST + 2):
        rank.run(number)
    with logged() as messages:
        rank.step.close()
    said = re.compile(r"a vote before a launch took the host \d+ us \(mean of 2\)")
    assert any(map(said.fullmatch, messages))
    rank.plain(*xy(5))
    assert rank.recorder.recordings[0].is_closed and copy.copy(rank.graphs.ended) == "closed"
    try:
        rank.step(*xy(5))
    except cf.CommFuseError as error:
        return str(error)
    return ""


def test_a_closed_step_of_ranks(ranks: Ranks) -> None:
    assert all(text.startswith("this step is closed") for text in ranks.values(closes_a_step))
