"""`commfuse auto TARGET`: search strategies, and compare the plans that were found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commfuse_fx.commands.arguments import EXIT_CODES, TARGETS, add_common, add_search, compile_options
from commfuse_fx.commands.console import say
from commfuse_fx.commands.output_files import check_report, write_result
from commfuse_fx.commands.plan_cases import Cases, PlannedCase
from commfuse_fx.commands.targets import load_target
from commfuse_fx.commands.what_if import cases
from commfuse_fx.cost.numbers import in_bytes
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.explain.compiled_graph import CompiledGraph
from commfuse_fx.inspect.report.page import report

DONE, NOTHING_FITS, INTERRUPTED = 0, 1, 130

_DESCRIPTION = f"""\
Search the strategies of a step, as parallel_mode="auto" does, and print the plans that were compared: predicted step
time, exposed communication, peak memory per rank, and the payload of collectives by kind. The plan that is taken has a
star. Below stands how parameters lie in it.

--devices with several numbers, --bandwidth and --memory ask what would be. They plan again without tracing again. Each
number of devices is planned as it is, and then with each combination of bandwidth and memory. Other numbers of devices
share the global batch of the first one, so that each rank has fewer of its rows, or more.

{TARGETS}
"""

_EPILOG = f"""\
examples:
  commfuse auto train.py:make --devices 64 --cluster h100-ib-8
  commfuse auto train.py:make --devices 64 --cluster h100-ib-8 --report plan.html
  commfuse auto train.py:make --devices 64,128 --cluster h100-ib-16
  commfuse auto train.py:make --devices 8 --cluster gloo-1gbit --bandwidth x2,x10 --memory 4GiB

{EXIT_CODES}; 1 also where no plan fits into --memory
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("target", metavar="TARGET", help="package.module:factory or path/to/file.py:factory")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    several: dict[str, Any] = {"action": "append", "default": []}
    group = command.add_argument_group("what if; each may be given several times, or with commas")
    group.add_argument("--devices", metavar="N", help="sizes of the virtual world (default: the mesh, or 2)", **several)
    group.add_argument("--bandwidth", metavar="xF", help="multiply the bandwidths of all levels, as in x2", **several)
    group.add_argument("--memory", metavar="BYTES", help="most that a rank may need, as in 40GiB", **several)
    command.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write the page of `commfuse report` about the plan; for a second case FILE-2, for a third one FILE-3",
    )
    command.add_argument("--force", action="store_true", help="replace FILE even if it is no report")
    add_search(command.add_argument_group("what a target is compiled for"))
    add_common(command)
    command.set_defaults(run=_run, parallel_mode="auto", memory_limit=None)


def _run(options: argparse.Namespace) -> int:
    given = compile_options(argparse.Namespace(**{**vars(options), "devices": None}))
    default = given["device_num"]
    asked = cases(options.devices, options.bandwidth, options.memory, default)
    if options.memory and options.schedule == "none":
        raise ConfigValueError("--memory needs a schedule: leave --schedule none out")
    if options.mesh is not None and any(case.devices != default for case in asked):
        raise ConfigValueError(f"--mesh {options.mesh} has {default} devices: leave --devices out, or --mesh")
    if given.get("strategy_ckpt_save_file") is not None and len({case.devices for case in asked}) > 1:
        raise ConfigValueError(
            f"--set strategy_ckpt_save_file={given['strategy_ckpt_save_file']!r} is one file for several numbers of "
            "devices: give one of them as --devices"
        )
    pages = _pages(options.report, len(asked))
    for page in pages:
        check_report(page, "--report", options.force)
    planner = Cases(load_target(options.target), options)
    planner.check(asked)
    found: list[PlannedCase] = []
    for case in asked:
        try:
            this = planner.plan(case)
        except KeyboardInterrupt:
            if not found:
                raise
            break
        if pages and planner.chosen is not None:
            page = pages[len(found)]
            write_result(page, report(CompiledGraph(planner.chosen, 0, (), dict)), "--report")
            this = replace(this, report=str(page))
        found.append(this)
        if not options.json:
            sys.stdout.write(_text(found))
            sys.stdout.flush()
        if this.was_interrupted:
            break
    if options.json:
        print(json.dumps({"cases": [asdict(each) for each in found]}, indent=1))
    left = len(asked) - len(found)
    if left or found[-1].was_interrupted:
        say(_interrupted(found[-1].was_interrupted, left, len(asked)))
        return INTERRUPTED
    return DONE if all(each.table.rows for each in found) else NOTHING_FITS


def _pages(first: Path | None, count: int) -> list[Path]:
    """The files of the reports on so many cases: plan.html, plan-2.html, plan-3.html."""
    if first is None:
        return []
    return [first, *(first.with_name(f"{first.stem}-{number}{first.suffix}") for number in range(2, count + 1))]


def _interrupted(amid_plans: bool, left: int, cases: int) -> str:
    """amid_plans: of the last case. left: cases of which there is no plan."""
    said = ["the last plan is the fastest of those that were made until then"] if amid_plans else []
    said += [f"{left} of {cases} cases {'is' if left == 1 else 'are'} left out"] if left else []
    return f"interrupted: {'; '.join(said)}"


def _text(found: Sequence[PlannedCase]) -> str:
    """The last case."""
    this, *before = reversed(found)
    lines = [f"{this.case}, cluster {this.cluster}"]
    if before and this.case.devices != before[-1].case.devices and this.global_batch and not this.no_plan:
        rows, each = this.global_batch, this.global_batch // this.case.devices
        lines.append(f"of the global batch of {rows} rows each rank has {each}")
    if before and this.traced:
        lines.append("traced again, as the model computes with a rank's own part of the batch")
    if this.no_plan:
        lines.append(f"no plan: {this.no_plan}: give numbers of devices that divide it")
    limit = this.case.memory
    if this.table.too_large and not this.table.rows and limit is not None:
        needed = min(each.needed for each in this.table.too_large)
        lines.append(
            f"no plan fits: the smallest needs {in_bytes(needed)} per rank, {in_bytes(needed - limit)} too much"
        )
        lines += (f"what would help: {each}" for each in this.helps)
    blank = "\n" if before else ""
    page = "" if this.report is None else f"report: {this.report}\n"
    return blank + "\n".join(lines) + "\n" + this.table.text() + page
