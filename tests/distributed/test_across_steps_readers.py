"""Whoever looks while updates are still to come: threads, Ctrl-C, modes of torch, and the last reference."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import commfuse_fx as cf
from commfuse_fx.runtime.execute.tail import Tail
from commfuse_fx.runtime.execute.wire.wire import Wire
from tests.distributed.harness import Ranks
from tests.distributed.test_across_steps import ACROSS, batches, is_deferred, make, values

pytestmark = pytest.mark.dist

SEVERAL = {"allreduce": {"mode": "index", "config": [3, 6, 9]}}
"""Buckets, so that the tail has several parts."""

Found = tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""What went wrong, the values that came out, and those of a training that nobody looked at."""


def train_beside(
    look: Callable[[nn.Module, cf.CompiledStep], Any] | None, count: int, optimizer: str = "adamw"
) -> dict[str, torch.Tensor]:
    """Train, and let somebody look after every step."""
    model, made, step = make(ACROSS, SEVERAL, optimizer)
    for x, y in batches(cf.get_rank(), count):
        step(x, y)
        assert is_deferred(step)
        if look is not None:
            look(model, step)
    return values(model, made)


def assert_undisturbed(found: list[Found]) -> None:
    for wrong, have, want in found:
        assert wrong == []
        assert have.keys() == want.keys()
        for name in want:
            assert torch.equal(have[name], want[name]), name


def read_in_threads() -> Found:
    """Three threads read at once, each another parameter."""
    errors: list[str] = []

    def read(param: nn.Parameter) -> None:
        try:
            param.detach().sum()
        except Exception as error:
            errors.append(repr(error))

    def look(model: nn.Module, _: Any) -> None:
        params = (model.head.weight, model.first.weight, model.blocks[1].bias)
        threads = [threading.Thread(target=read, args=(param,)) for param in params]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return errors, train_beside(look, 15), train_beside(None, 15)


def test_threads_that_read_at_once(ranks: Ranks):
    assert_undisturbed(ranks.values(read_in_threads))


def read_in_the_background() -> Found:
    """A thread reads all the time, while the steps run: also parts of the tail that a step is about to run."""
    errors: list[str] = []
    model, made, step = make(ACROSS, SEVERAL)
    end = threading.Event()

    def read() -> None:
        while not end.wait(0.0005):
            try:
                for param in model.parameters():
                    param.detach().sum()
            except Exception as error:
                errors.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for x, y in batches(cf.get_rank(), 40):
            step(x, y)
    finally:
        end.set()
        reader.join()
    return errors, values(model, made), train_beside(None, 40)


def test_a_thread_that_reads_while_steps_run(ranks: Ranks):
    assert_undisturbed(ranks.values(read_in_the_background))


INTERRUPTED = (Tail, Wire)
"""Ctrl-C comes at every line of their methods, and of the generated code."""


def at_line(number: int, act: Callable[[], None], call: Callable[[], Any]) -> int:
    """Make the call, and act just before the line of this number of `INTERRUPTED`. Returns how many lines were run."""
    files = [inspect.getsourcefile(each) for each in INTERRUPTED]
    lines = 0

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        name = frame.f_code.co_filename
        if name not in files and not name.startswith("<commfuse step"):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def read_interrupted() -> tuple[int, Found]:
    """One read for each line of what it runs, interrupted there, and then read again."""
    model, made, step = make(ACROSS, SEVERAL)
    data = batches(cf.get_rank(), 1)[0]
    step(*data)
    lines = at_line(0, lambda: None, model.head.weight.detach)
    interrupted = 0
    for number in range(1, lines + 1):
        step(*data)
        try:
            at_line(number, lambda: signal.raise_signal(signal.SIGINT), model.head.weight.detach)
        except KeyboardInterrupt:
            interrupted += 1
        model.head.weight.detach()
        assert not is_deferred(step)
    have = values(model, made)
    model, made, step = make(ACROSS, SEVERAL)
    for _ in range(lines + 1):
        step(*data)
    return lines - interrupted, ([], have, values(model, made))


def test_a_read_that_is_interrupted_anywhere_can_be_repeated(ranks: Ranks):
    found = ranks.values(read_interrupted)
    assert [missed for missed, _ in found] == [0, 0]
    assert_undisturbed([rest for _, rest in found])


def in_a_fake_world(model: nn.Module, _: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.head.bias * 2


def while_tracing(model: nn.Module, _: Any) -> None:
    x = torch.ones(4, dtype=torch.float64)
    traced = make_fx(lambda given: given * model.head.bias)(x)
    assert torch.equal(traced(x), model.head.bias)


def with_another_default_device(model: nn.Module, _: Any) -> None:
    with torch.device("meta"):
        model.head.bias.sum()


def in_a_gradient(model: nn.Module, _: Any) -> None:
    x = torch.ones(4, dtype=torch.float64)
    assert torch.equal(torch.func.grad(lambda given: (given * model.head.bias).sum())(x), model.head.bias)


def in_a_batch(model: nn.Module, _: Any) -> None:
    rows = torch.eye(4, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(lambda row: (row * model.head.bias).sum())(rows), model.head.bias)


MODES = [in_a_fake_world, while_tracing, with_another_default_device, in_a_gradient, in_a_batch]


def read_in_modes(optimizer: str) -> Found:
    left = [mode for mode in MODES for _ in range(2)]
    unfinished = []

    def look(model: nn.Module, step: cf.CompiledStep) -> None:
        mode = left.pop(0)
        mode(model, step)
        if is_deferred(step):
            unfinished.append(mode.__name__)

    count = len(left)
    return unfinished, train_beside(look, count, optimizer), train_beside(None, count, optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_modes_of_torch_do_not_see_the_update(ranks: Ranks, optimizer: str):
    assert_undisturbed(ranks.values(read_in_modes, optimizer))


def parameters_of_parameters() -> list[Any]:
    """`nn.Parameter(param)` of a pending parameter, then of a complete one, with a gradient or without."""
    model, _, step = make(ACROSS, SEVERAL)
    found: list[Any] = []
    for x, y in batches(cf.get_rank(), 2):
        for requires_grad in (True, False):
            step(x, y)
            param = model.head.bias
            for _ in range(2):
                other = nn.Parameter(param, requires_grad)
                same_memory = other.data_ptr() == param.data_ptr()
                found.append((type(other), type(param), type(param.detach()), other.requires_grad, same_memory))
    return found


def test_a_parameter_of_a_pending_parameter(ranks: Ranks):
    once = [(nn.Parameter, nn.Parameter, torch.Tensor, grad, True) for grad in (True, True, False, False)]
    assert ranks.values(parameters_of_parameters) == [once * 2] * 2


def dropped() -> tuple[list[bool], list[bool], bool]:
    """Which of session, executor and model live on when the step is dropped, and when all of it is; what a parameter
    that was kept holds."""

    def pending() -> tuple[list[weakref.ref[Any]], nn.Module]:
        model, _, step = make(ACROSS, SEVERAL)
        step(*batches(cf.get_rank(), 1)[0])
        assert is_deferred(step)
        return [weakref.ref(each) for each in (step.session, step.session.running, model)], model

    def alive(refs: list[weakref.ref[Any]]) -> list[bool]:
        gc.collect()
        return [ref() is not None for ref in refs]

    refs, model = pending()
    while_pending = alive(refs)
    kept = model.head.bias.detach().clone()
    del model
    afterwards = alive(refs)
    refs, model = pending()
    del model
    assert alive(refs) == afterwards
    return while_pending, afterwards, torch.equal(kept, train_beside(None, 1)["head.bias"])


def test_a_step_that_is_dropped_while_an_update_is_pending(ranks: Ranks):
    """The update comes with the next look at a parameter; where nobody can look any more, nothing is kept."""
    assert ranks.values(dropped) == [([True] * 3, [False] * 3, True)] * 2


def closed() -> list[bool]:
    """Which of what a step votes with, its groups and its executor live on when it is closed."""
    _, _, step = make(ACROSS, SEVERAL)
    step(*batches(cf.get_rank(), 1)[0])
    session = step.session
    refs = [weakref.ref(each) for each in (session.agreement, session.runners.groups, session.running)]
    step.close()
    gc.collect()
    return [ref() is not None for ref in refs]


def test_a_step_that_is_closed_holds_no_group(ranks: Ranks):
    assert ranks.values(closed) == [[False] * 3] * 2
