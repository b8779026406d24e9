"""Gloo's socket threads beside a step: which of them are scheduled how."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from commfuse_fx.measure.calibration import calibrate
from commfuse_fx.runtime.execute.wire import socket_threads
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, compiled, mlp, xy


def policies(cores: int, run: str) -> tuple[set[int], set[int]]:
    """Scheduling classes of the socket threads, and of all other threads, after a step or a calibration."""
    # Threads of an earlier run in this process may still be there, scheduled as that run left them.
    for thread in socket_threads.socket_threads():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        if run == "calibrate":
            calibrate(0.05)
        else:
            model = mlp()
            compiled(model, adamw(model))(*xy(0, rank=0))
        sockets = socket_threads.socket_threads()
        others = [int(name) for name in os.listdir("/proc/self/task") if int(name) not in sockets]
        assert sockets, "a Gloo world has socket threads"
        return {os.sched_getscheduler(t) for t in sockets}, {os.sched_getscheduler(t) for t in others}
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("run", ["step", "calibrate"])
def test_on_one_core_socket_threads_let_others_go_on_and_nobody_else_changes(ranks: Ranks, run: str) -> None:
    for sockets, others in ranks.values(policies, 1, run):
        assert os.SCHED_BATCH in sockets
        assert others == {os.SCHED_OTHER}
        if run == "step":
            assert sockets == {os.SCHED_BATCH}, "those of the votes, too"


def with_two_cores() -> tuple[set[int], set[int]]:
    """A step of a rank that is told that it has two cores, on whatever machine."""
    held, socket_threads.os = socket_threads.os, SimpleNamespace(**{**vars(os), "sched_getaffinity": lambda _: {0, 1}})
    try:
        return policies(1, "step")
    finally:
        socket_threads.os = held


def test_with_more_cores_they_stay_as_they_are(ranks: Ranks) -> None:
    assert ranks.values(with_two_cores) == [({os.SCHED_OTHER}, {os.SCHED_OTHER})] * 2


def refused() -> None:
    """A step where a sandbox forbids to change the class."""

    def forbid(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    held, socket_threads.os = socket_threads.os, SimpleNamespace(**{**vars(os), "sched_setscheduler": forbid})
    try:
        assert policies(1, "step") == ({os.SCHED_OTHER}, {os.SCHED_OTHER})
    finally:
        socket_threads.os = held


def test_a_refusal_changes_nothing(ranks: Ranks) -> None:
    ranks.values(refused)


def test_a_system_without_proc_has_none_to_show(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(socket_threads, "_TASKS", socket_threads.Path(f"{tmp_path}/none"))
    assert socket_threads.socket_threads() == []
    socket_threads.let_lock_holders_run()
