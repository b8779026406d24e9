"""Saves that are killed or find no room, and loads while somebody saves: a whole checkpoint is there at all times."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import commfuse_fx as cf
from commfuse_fx.checkpoints import tensor_reader, tensor_writer
from tests.frontends.test_checkpoints import check_nothing_changed
from tests.frontends.test_step_state import make, run

OPERATIONS = ("open", "ctypes.dlsym", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def killed_at(operation: int, act: Callable[[], Any]) -> bool:
    """Whether a child of this process is killed that does this, at its so-many-eth operation on files."""
    gc.disable()
    child = os.fork()
    if child:
        gc.enable()
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    left = operation

    def hook(event: str, _: Any) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        act()
    finally:
        os._exit(0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_at_any_operation_on_files(tmp_path: Path, asynchronous: bool) -> None:
    """There is the checkpoint before or the new one, and the next save removes what is left over."""
    step, path = make(), tmp_path / "kept"
    run(step, range(1))
    found, number = [], 0
    while True:
        step.save(path, {"is": "old"})
        assert os.listdir(tmp_path) == ["kept"]
        number += 1
        was_killed = killed_at(number, lambda: step.save(path, {"is": "new"}, asynchronous=asynchronous).wait())
        found.append(step.load(path)["is"])
        if not was_killed:
            break
    count = found.count("old")
    assert found == ["old"] * count + ["new"] * (len(found) - count)
    assert count > 10 and len(found) - count > 4, "killed before the folder appears, and behind that"


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Nobody can write beyond that: the system fails as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [0, 700, 20_000])
def test_files_that_cannot_grow(tmp_path: Path, nbytes: int) -> None:
    step = make()
    run(step, range(1))
    step.save(tmp_path / "kept", {"number": 1})
    with files_of_at_most(nbytes):
        for asynchronous in (False, True):
            with pytest.raises(cf.CheckpointError, match="cannot write there: File too large. Make room"):
                step.save(tmp_path / "kept", asynchronous=asynchronous).wait()
    assert os.listdir(tmp_path) == ["kept"] and step.load(tmp_path / "kept") == {"number": 1}


def test_the_error_of_a_save_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_writer, "write_share", full)
    step.save(tmp_path / "kept", asynchronous=True)
    with pytest.raises(cf.CheckpointError, match="No space left on device"):
        step.close()
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "a checkpoint has not been written: step.save(" in record.getMessage()
    step.close()
    with pytest.raises(cf.CommFuseError, match="closed"):
        run(step, range(1))


def test_a_save_of_somebody_else_while_a_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, other = make(), make()
    run(other, range(2))
    for each in (step, other):
        each.save(tmp_path / "kept")
    real = tensor_reader.read_parts

    def late(*args: Any) -> Any:
        step.save(tmp_path / "kept")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_reader, "read_parts", late)
        said = "has been replaced by a save while it was read: load it again"
        check_nothing_changed(other, lambda: other.load(tmp_path / "kept"), cf.CheckpointError, said)
    other.load(tmp_path / "kept")
    assert other.steps == 0
