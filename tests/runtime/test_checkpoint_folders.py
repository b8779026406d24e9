"""The folder of a checkpoint is the old one or the new one, and nothing else, whenever a writer is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from commfuse_fx.checkpoints import folders
from commfuse_fx.checkpoints.checkpoint_index import NAME
from commfuse_fx.checkpoints.folders import CheckpointFolder
from commfuse_fx.errors import CheckpointError, ConfigTypeError


def save(path: Any, text: str) -> None:
    folder = CheckpointFolder(path)
    part = folder.begin()
    (part / NAME).write_text(text)
    folder.complete(part)


def load(path: Any) -> str:
    return (CheckpointFolder(path).existing() / NAME).read_text()


@pytest.fixture(params=["exchange", "rename"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the operation that exchanges folders, and where the file system has none."""
    if request.param == "rename":
        monkeypatch.setattr(folders, "_EXCHANGE", 1 << 20)  # a flag that no file system knows
    return str(request.param)


def test_a_folder_appears_and_is_replaced(tmp_path: Path, way: str) -> None:
    path = tmp_path / "made" / "on [the] way"
    for number in range(3):
        save(path, str(number))
        assert load(path) == str(number) and os.listdir(path.parent) == [path.name]
    save(str(path), "text")
    assert load(os.fsencode(str(path)).decode()) == "text"


def test_an_empty_folder_and_a_link_are_taken(tmp_path: Path, way: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("one", "two"):
        save(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and load(tmp_path / "real") == text


class Killed(BaseException):
    pass


RENAMES = ("first rename", "second rename", "third rename")
"""The first one is refused, as the folder is there."""


@pytest.mark.parametrize("place", ["written", "exchanged", *RENAMES, "removed"])
def test_a_writer_that_is_killed(tmp_path: Path, way: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    save(path, "old")
    with monkeypatch.context() as patch:
        _die(patch, place)
        try:
            save(path, "new")
            was_killed = False
        except Killed:
            was_killed = True
    at_all = place in ("written", "first rename", "removed")
    assert was_killed == (at_all or (way == "exchange") == (place == "exchanged"))
    assert load(path) == ("old" if was_killed and place not in ("exchanged", "removed") else "new")
    save(path, "newer")
    assert load(path) == "newer" and os.listdir(tmp_path) == ["kept"]


def _die(patch: pytest.MonkeyPatch, place: str) -> None:
    renames = 0
    rename, exchanged = os.rename, folders._exchanged

    def counted(one: Any, other: Any) -> None:
        nonlocal renames
        if place == RENAMES[renames]:
            raise Killed
        renames += 1
        rename(one, other)

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    patch.setattr(os, "rename", counted)
    if place == "written":
        patch.setattr(folders, "_sync", killed)
    elif place == "exchanged":
        patch.setattr(folders, "_exchanged", lambda one, other: exchanged(one, other) and killed())
    elif place == "removed":
        patch.setattr(shutil, "rmtree", killed)


def test_what_killed_writers_have_left_is_removed(tmp_path: Path) -> None:
    others = [".kept.2.0123456789ab.part", ".other.0123456789ab.part"]  # of folders "kept.2" and "other"
    for name in (".kept.0123456789ab.part", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    save(tmp_path / "kept", "text")
    assert sorted(os.listdir(tmp_path)) == [*others, "kept"]


def test_two_writers(tmp_path: Path, way: str) -> None:
    """Each has its own folder, and the last one to complete stays."""
    path = tmp_path / "kept"
    for kept in ("", "old"):
        if kept:
            save(path, kept)
        one, other = CheckpointFolder(path), CheckpointFolder(path)
        parts = one.begin(), other.begin()
        save(path, "third")
        for folder, part, text in ((other, parts[1], "second"), (one, parts[0], "first")):
            (part / NAME).write_text(text)
            folder.complete(part)
            assert load(path) == text
        assert os.listdir(tmp_path) == ["kept"]


def test_a_writer_that_another_one_takes_for_dead(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks, it fails, and what the other one has written is whole."""
    path = tmp_path / "kept"

    def without(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", without)
    slow = CheckpointFolder(path)
    part = slow.begin()
    (part / NAME).write_text("half")
    save(path, "whole")
    with pytest.raises(FileNotFoundError):
        slow.complete(part)
    slow.abandon(part)
    assert load(path) == "whole" and os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("nothing", "there is no folder"),
        ("empty", f"has no {NAME}, so it is no checkpoint that step.save.. has completed"),
        ("dcp", "torch.distributed.checkpoint itself has written it"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, made: str, said: str) -> None:
    path = tmp_path / "kept"
    if made != "nothing":
        path.mkdir()
    if made == "dcp":
        (path / ".metadata").touch()
    with pytest.raises(CheckpointError, match=said):
        CheckpointFolder(path).existing()


def test_files_of_the_user_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="other files than those of a checkpoint.* give a folder of its own"):
        CheckpointFolder(tmp_path).begin()
    with pytest.raises(CheckpointError, match="is a file: give the path of a folder"):
        CheckpointFolder(tmp_path / "notes.txt").begin()
    with pytest.raises(OSError, match="exists"):
        CheckpointFolder(tmp_path / "notes.txt" / "kept").begin()
    assert (tmp_path / "notes.txt").read_text() == "mine" and os.listdir(tmp_path) == ["notes.txt"]
    save(tmp_path / "kept", "text")
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"other files than those of a checkpoint \(notes.txt\)"):
        CheckpointFolder(tmp_path / "kept").begin()
    assert (tmp_path / "kept" / "notes.txt").read_text() == "mine" and load(tmp_path / "kept") == "text"
    folder = CheckpointFolder(tmp_path / "late")
    part = folder.begin()
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "notes.txt").write_text("mine")  # while it is written
    with pytest.raises(CheckpointError, match=r"other files than those of a checkpoint \(notes.txt\)"):
        folder.complete(part)
    assert (tmp_path / "late" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["/proc", "/"])
def test_where_a_file_system_is_mounted(path: str) -> None:
    with pytest.raises(CheckpointError, match="where a file system is mounted.* such as '.*/checkpoint'"):
        CheckpointFolder(path).begin()


@pytest.mark.parametrize("path", [None, 3, "", ["a"], "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ConfigTypeError, match="the folder of a checkpoint is .*; give the path of a folder"):
        CheckpointFolder(path)
