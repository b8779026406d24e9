"""Tasks of equal text run in one process of a host at a time, and no process waits while there is something else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from commfuse_fx.runtime.execute.inductor import shared_compiles
from commfuse_fx.runtime.execute.inductor.half_written import remove_half_written
from commfuse_fx.runtime.execute.inductor.shared_compiles import compile_each


def tasks(done: list[str], *texts: str) -> dict[str, Callable[[], str]]:
    def run(text: str) -> str:
        done.append(text)
        return text.upper()

    return {text: lambda text=text: run(text) for text in texts}


def test_every_rank_begins_at_another_task(tmp_path: Path) -> None:
    for rank, order in ((0, ["a", "b", "c"]), (1, ["b", "c", "a"]), (5, ["c", "a", "b"])):
        done: list[str] = []
        assert compile_each(tasks(done, "a", "b", "c"), rank, tmp_path) == {"a": "A", "b": "B", "c": "C"}
        assert done == order
    assert compile_each({}, 1, tmp_path) == {}


def lock_of(text: str, folder: Path) -> FileLock:
    """The lock of a task, held as by another process."""
    compile_each(tasks([], text), 0, folder)
    (path,) = folder.iterdir()
    lock = FileLock(path, thread_local=False)
    lock.acquire()
    return lock


def test_what_another_process_runs_comes_last_and_when_that_is_done(tmp_path: Path) -> None:
    lock = lock_of("a", tmp_path)
    done: list[str] = []
    others = tasks(done, "a", "b")

    def b() -> str:
        threading.Timer(0.2, lambda: (done.append("released"), lock.release())).start()
        done.append("b")
        return "B"

    assert compile_each({**others, "b": b}, 0, tmp_path) == {"a": "A", "b": "B"}
    assert done == ["b", "released", "a"]


def test_nobody_waits_for_ever_nor_for_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of("a", tmp_path)
    monkeypatch.setattr(shared_compiles, "LONGEST_WAIT", 0.1)
    assert compile_each(tasks([], "a"), 0, tmp_path) == {"a": "A"}
    lock.release()
    (tmp_path / "file").write_text("")
    assert compile_each(tasks([], "a"), 0, tmp_path / "file" / "folder") == {"a": "A"}


def test_what_a_killed_process_was_running_is_run_by_another(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        compile_each({"a": lambda: (os.write(writing, b"."), time.sleep(60.0))}, 0, tmp_path)
        os._exit(1)
    os.read(reading, 1)
    done: list[str] = []
    others = tasks(done, "a", "b")

    def b() -> str:
        os.kill(child, signal.SIGKILL)
        return others["b"]()

    assert compile_each({**others, "b": b}, 0, tmp_path) == {"a": "A", "b": "B"}
    assert done == ["b", "a"] and os.waitpid(child, 0)[1] == signal.SIGKILL


def test_libraries_that_no_linker_has_finished_are_removed_unless_somebody_writes_them(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    names = "whole.so", "empty.so", "begun.main.so", "written.main.so"
    paths = [tmp_path / "ab" / name for name in names]
    for path, head in zip(paths, (b"\x7fELF", b"", bytes(64), bytes(64)), strict=True):
        path.write_bytes(head)
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "written.lock"):
        assert remove_half_written(tmp_path) == [paths[2], paths[1]]
    assert [path for path in paths if path.exists()] == [paths[0], paths[3]]
    assert remove_half_written(tmp_path / "nowhere") == []
