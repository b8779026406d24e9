"""Files that commands write where the user says."""

from __future__ import annotations

from pathlib import Path

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.writing import problem_with, write_whole

_HEAD_BYTES, _TITLE = 4096, b"<title>Compiled training step</title>"
"""What a report is known by."""


def check_writable(path: Path, option: str) -> None:
    """Before the work whose result goes there. Raises ConfigValueError."""
    problem = problem_with(path, option)
    if problem:
        raise ConfigValueError(problem)


def check_report(path: Path, option: str, force: bool) -> None:
    """Before a report is made. Raises ConfigValueError, also for a file that is no report, unless `force`."""
    check_writable(path, option)
    if path.exists() and not force and not _is_report(path):
        raise ConfigValueError(f"{option} {path} exists and is no report of commfuse: give another name, or --force")


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return head.startswith(b"<!DOCTYPE html>") and _TITLE in head


def write_result(path: Path, text: str, option: str) -> None:
    """Write the file whole. Raises ConfigValueError where that fails after all."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigValueError(f"{option} {path} cannot be written: {error.strerror or error}") from error
