"""`commfuse simulate TARGET|SAVED`: predict the time of a step."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from commfuse_fx.commands.arguments import EXIT_CODES, SAVED, TARGETS, add_common, add_compile
from commfuse_fx.commands.graph_sources import compiled_or_saved, prices
from commfuse_fx.commands.output_files import check_writable, write_result
from commfuse_fx.inspect.explain.table import aligned
from commfuse_fx.simulate.simulation import Simulation

_DESCRIPTION = f"""\
Predict a step on a cluster: its time, the exposed communication, the peak memory and a lower bound.

{TARGETS}

{SAVED}
"""

_EPILOG = f"""\
examples:
  commfuse simulate train.py:make --devices 8 --cluster gloo-1gbit
  commfuse simulate train.py:make --devices 8 --trace step.json           # open it in Perfetto
  commfuse simulate before/ --compare gloo-1gbit --compare gloo-10gbit    # one graph on several clusters

{EXIT_CODES}
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("source", metavar="TARGET|SAVED", help="what to compile, or what was saved")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.add_argument("--trace", metavar="FILE", type=Path, help="also write the step as a Chrome trace")
    command.add_argument(
        "--compare",
        metavar="CLUSTER",
        action="append",
        default=[],
        help="print a table of the same graph on these clusters instead; may be given several times",
    )
    add_compile(command)
    add_common(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.trace is not None:
        check_writable(options.trace, "--trace")
    lowered = compiled_or_saved(options)
    several = {name: lowered.simulate(name) for name in options.compare}
    one = None if several and options.trace is None else lowered.simulate(prices(options))
    if options.trace is not None and one is not None:
        write_result(options.trace, one.chrome_trace(), "--trace")
    if several:
        _print_table(several, options.json)
    elif one is not None:
        sys.stdout.write(f"{json.dumps(one.to_json(), indent=1)}\n" if options.json else one.text())
    return 0


def _print_table(found: Mapping[str, Simulation], as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: each.to_json() for name, each in found.items()}, indent=1))
        return
    head = ("cluster", "step ms", "compute ms", "exposed ms", "bound ms", "gap")
    rows = [
        (
            name,
            *(f"{seconds * 1e3:.3f}" for seconds in _times(each)),
            f"{each.gap:.1%}",
        )
        for name, each in found.items()
    ]
    sys.stdout.write(aligned((head, *rows), head[1:]))


def _times(each: Simulation) -> tuple[float, ...]:
    return each.step_seconds, each.compute_seconds, each.exposed_seconds, each.bound_seconds
