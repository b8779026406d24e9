"""Forked processes: they read what the parent has, and never wait for what only the parent can do."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import mlp, momentum, xy
from tests.logs import logged
from tests.sharding.elementwise import ONE_AXIS, batch, make_step

pytestmark = pytest.mark.dist

ACROSS: dict[str, Any] = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "default"}
LIMIT = 30.0
"""Seconds until a child counts as hung."""


def in_fork(function: Callable[[], Any], leave: Callable[[], None] | None = None) -> Any:
    """What a function returns in a forked child, or the error that it raises as text. leave: called by the child before
    it ends."""
    _may_have_children()
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        try:
            theirs.send(function())
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        if leave is not None:
            leave()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert ours.poll(LIMIT), "the child hangs"
        found = ours.recv()
        assert connection.wait([process.sentinel], LIMIT), "the child does not end"
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    return found


def _may_have_children() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def norms(model: nn.Module) -> list[float]:
    return [float(param.detach().norm()) for param in model.parameters()]


class Reads(Dataset[Any]):
    """Its samples are what it reads in a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(norms(self.model))


def make() -> tuple[nn.Module, cf.CompiledStep]:
    model = mlp()
    return model, cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model), **ACROSS)


def read_while_pending(methods: tuple[str, ...]) -> list[bool]:
    """Whether children see the parent's values, though its updates were still to come."""
    _may_have_children()
    model, step = make()
    same: list[bool] = []
    for number, method in enumerate(methods):
        step(*xy(number))
        assert step.session.running is not None and step.session.running.tail.is_pending
        if method == "state":
            (state, *_) = step.optimizer.state.values()  # type: ignore[union-attr]
            found = in_fork(lambda buffer=state["momentum_buffer"]: float(buffer.norm()))
            same.append(found == float(state["momentum_buffer"].norm()))
        elif method == "os.fork":
            ours, theirs = os.pipe()
            if not (child := os.fork()):
                os.write(theirs, repr(norms(model)).encode())
                os._exit(0)
            same.append(os.read(ours, 10_000).decode() == repr(norms(model)))
            os.waitpid(child, 0)
        elif method == "pickle":  # what spawn and forkserver hand to a child
            sent = pickle.loads(ForkingPickler.dumps(Reads(model)))
            same.append(norms(sent.model) == norms(model))
        else:
            found = list(DataLoader(Reads(model), 2, num_workers=1, multiprocessing_context="fork", timeout=LIMIT))
            same += [torch.equal(each, torch.tensor([norms(model)] * 2)) for each in found]
    step(*xy(9))
    return same


def test_children_read_values_that_were_pending(ranks: Ranks):
    for same in ranks.values(read_while_pending, ("fork", "os.fork", "state", "pickle")):
        assert same == [True] * 5


def fork_beside_a_training() -> list[Any]:
    """Children of a rank that trains in another thread, and of one in which another thread is finishing an update."""
    model, step = make()
    step(*xy(0))
    stop = threading.Event()

    def train() -> None:
        for number in range(20):
            step(*xy(number))
        stop.set()

    thread = threading.Thread(target=train)
    thread.start()
    found = []
    while not stop.is_set():
        found.append(in_fork(lambda: len(norms(model))))
    thread.join()
    assert step.session.running is not None
    guard, held, done = step.session.running.guard, threading.Event(), threading.Event()
    step.synchronize()

    def hold() -> None:
        with guard.lock:
            held.set()
            done.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(LIMIT)
    found.append(in_fork(lambda: step.synchronize() or len(norms(model))))
    done.set()
    thread.join()
    return found


def test_a_fork_beside_a_training(ranks: Ranks):
    for found in ranks.values(fork_beside_a_training):
        assert set(found) <= {6} | {each for each in found if "ForkError" in str(each)}
        assert found[-1] == 6


def end_as_an_interpreter() -> None:
    """What may let go of groups when a child ends: functions of atexit, and modules that are taken apart."""
    atexit._run_exitfuncs()
    dist.destroy_process_group()
    gc.collect()


def asked_too_much() -> list[str]:
    _, step = make()
    step(*xy(0))
    divided = make_step(ONE_AXIS, (1, 2), "adamw", virtual=False)
    divided(batch(0, 0))
    found = [
        in_fork(call, end_as_an_interpreter)
        for call in (
            lambda: step(*xy(1)),
            lambda: step.profile(*xy(1)),
            lambda: cf.compile(mlp(), loss_fn=F.cross_entropy),
            lambda: divided.model.a.sum(),
            lambda: divided.model.state_dict()["a"].sum(),
            lambda: divided(batch(1, 0)),
        )
    ]
    found.append(str(in_fork(lambda: float(step.lower(*xy(1)).explain() is not None))))
    step(*xy(1))  # the parent goes on
    divided.model.share_memory()  # as pickling for a spawned process does
    divided(batch(1, 0))
    whole = float(divided.model.a.sum())
    found.append(str(in_fork(lambda: float(divided.model.a.sum())) == whole))
    return found


def test_what_only_the_parent_can_do_is_refused_at_once(ranks: Ranks):
    ranks.renew()  # what ends in the children is what this test has made
    for *refused, lowered, read in ranks.values(asked_too_much):
        for text, reason in zip(refused, ("step",) * 2 + ("group",) + ("divided",) * 2 + ("step",), strict=True):
            assert text.startswith("ForkError: process ") and reason in text, text
        assert read == "True"
        assert lowered == "1.0" or "Autograd-and-Fork" in lowered  # CUDA builds of torch run no autograd in a child


def lost_before_a_fork() -> tuple[list[str], bool]:
    """The updates that a fork has to finish never come."""
    _, step = make()
    step(*xy(0))
    assert step.session.running is not None
    tail = step.session.running.tail
    tail.parts = [replace(part, run=_lose) for part in tail.parts]
    with logged() as messages:
        in_fork(lambda: 0)
    with pytest.raises(cf.CollectiveError, match=r"a peer is lost.*of its updates, 0 of \d+ parts"):
        step(*xy(1))
    with pytest.raises(cf.CollectiveError, match="an earlier step ended"):
        step(*xy(1))
    return messages, step.session.running.tail.is_pending


def _lose(values: list[Any]) -> None:
    raise cf.CollectiveError("a peer is lost.")


def test_an_update_that_is_lost_before_a_fork_is_not_forgotten(ranks: Ranks):
    for (message,), is_pending in ranks.values(lost_before_a_fork):
        assert "while a process is forked: a peer is lost." in message
        assert not is_pending


def alone_in_its_world() -> list[Any]:
    model = mlp()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model))
    step(*xy(0, rank=0))
    want = in_fork(lambda: (step(*xy(1, rank=0)).item(), norms(model)))
    return [want == (step(*xy(1, rank=0)).item(), norms(model))]


def test_a_child_of_a_single_process_may_go_on():
    assert alone_in_its_world() == [True]
