"""`commfuse calibrate`: measure the network and the devices of the running ranks."""

from __future__ import annotations

import argparse
import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from commfuse_fx.commands.arguments import add_common
from commfuse_fx.commands.console import say
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.measure.calibration import DEFAULT_SECONDS, Calibration, calibrate
from commfuse_fx.runtime.ranks.joining.world import init
from commfuse_fx.support.objects import gather_objects
from commfuse_fx.support.ranks import is_distributed
from commfuse_fx.support.writing import problem_with, write_whole

_HOW_TO_START = "torchrun --nproc-per-node 2 -m commfuse_fx calibrate --out gloo.json"

_DESCRIPTION = f"""\
Measure the network and the devices of the ranks it runs on, and write them to a file that cluster= takes.
Start it on all ranks: {_HOW_TO_START}
"""

_EPILOG = f"""\
examples:
  {_HOW_TO_START}
  commfuse simulate train.py:make --cluster gloo.json     # afterwards: predict a step on what was measured

exit codes: 0 done, 1 failed, 2 bad usage, or a file that cannot be written, 130 interrupted
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
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
    add_common(command)
    command.set_defaults(run=_run, on_all_ranks=True)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds")
    return value


def _run(options: argparse.Namespace) -> int:
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
    problem = gather_objects(_problem_with(options.out) if dist.get_rank() == 0 else "")[0]
    if problem:
        raise ConfigValueError(problem)
    found = calibrate(seconds=options.seconds, device=options.device)
    if dist.get_rank() == 0:
        write_whole(options.out, found.cluster.to_json())
        _print_report(found, options)
    if started_here:
        dist.destroy_process_group()
    return 0


def _problem_with(path: Path) -> str:
    if path.suffix != ".json":
        return f"--out {path} must end with .json, so that cluster= takes it for a file"
    return problem_with(path, "--out")


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
    for warning in found.report.warnings:
        say(f"warning: {warning}")
