"""The command line: `commfuse COMMAND`, or `python -m commfuse_fx COMMAND`.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted. Results go to stdout, messages to stderr, and under
torchrun both come from rank 0 only, except for errors that a rank has by itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from commfuse_fx.commands import diff
from commfuse_fx.cost.calibrate import DEFAULT_SECONDS, Calibration, calibrate
from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.runtime.world import init, is_distributed

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

_HOW_TO_START = "torchrun --nproc-per-node 2 -m commfuse_fx calibrate --out gloo.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    argv: the arguments. None: those of the process, which then ends here if a command fails amid collectives.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as done:  # --help, or bad usage
        return int(done.code or 0)
    code = _run(options)
    if code != DONE and argv is None and is_distributed():
        # Collectives may be unfinished. Gloo's threads then free their tensors while the interpreter ends, which
        # aborts the process with another exit code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        try:
            code: int = options.run(options)
            return code
        except Exception as error:
            return _fail(options, error)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _say(message: str) -> None:
    if _rank() == 0:
        print(f"commfuse: {message}", file=sys.stderr)


def _fail(options: argparse.Namespace, error: Exception) -> int:
    if options.traceback:
        traceback.print_exception(error)
    is_usage = isinstance(error, (ConfigKeyError, ConfigTypeError, ConfigValueError))
    text = str(error) or type(error).__name__
    if is_usage:
        _say(text)
        return BAD_USAGE
    line = next(line for line in text.splitlines() if line.strip())
    where = f"rank {_rank()}: " if is_distributed() else ""
    print(f"commfuse: {where}{type(error).__name__}: {line} (--traceback shows where)", file=sys.stderr)
    return FAILED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong once, not on every rank."""

    def error(self, message: str) -> NoReturn:
        if _rank() == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(BAD_USAGE)

    def print_help(self, file: Any = None) -> None:
        if _rank() == 0:
            super().print_help(file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="commfuse", description="Tools of commfuse-fx, a graph compiler for distributed training.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_calibrate(commands)
    diff.register(commands)
    return parser


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser(
        "calibrate",
        help="measure the network and the devices of the running ranks",
        description="Measure the network and the devices of the ranks it runs on, and write them to a file that "
        f"cluster= takes. Start it on all ranks: {_HOW_TO_START}",
    )
    command.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("commfuse-profile.json"),
        help="where to write the cluster; ends with .json (default: %(default)s)",
    )
    command.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        help="roughly how long to measure (default: %(default)g)",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=_calibrate)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds")
    return value


def _calibrate(options: argparse.Namespace) -> int:
    started_here = not is_distributed()
    with _interruptible():
        init()
    if dist.get_world_size() < 2:
        if started_here:
            dist.destroy_process_group()
        raise ConfigValueError(
            f"calibrate measures the network between ranks, and this is a world of one: start it with {_HOW_TO_START}"
        )
    # Rank 0 writes, so its disk decides, and before anybody measures.
    problem = [_problem_with(options.out) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ConfigValueError(problem[0])
    found = calibrate(seconds=options.seconds, device=options.device)
    if dist.get_rank() == 0:
        _write_whole(options.out, found.cluster.to_json())
        _print_report(found, options)
    if started_here:
        dist.destroy_process_group()
    return DONE


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once (130 to a shell): while torch waits for other ranks, Python is not asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_report(found: Calibration, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"file": str(options.out), **found.report.to_dict()}, indent=1))
    else:
        print(f'{found.report.text()}written to {options.out}: give cluster="{options.out}"')


def _problem_with(path: Path) -> str:
    """Why this file cannot be written; empty when it can."""
    folder = path.parent
    if path.suffix != ".json":
        return f"--out {path} must end with .json, so that cluster= takes it for a file"
    if path.is_dir():
        return f"--out {path} is a folder: give the name of a file in it"
    if not folder.is_dir():
        return f"--out {path}: there is no folder {folder}; make it first"
    if not os.access(folder, os.W_OK):
        return f"--out {path}: the folder {folder} cannot be written; give another one"
    return ""


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing: an interrupt leaves no half of a file, and an old one stays until the new one is there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
