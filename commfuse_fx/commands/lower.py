"""`commfuse lower TARGET`: compile a step or a module for a virtual world and print its graph."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commfuse_fx.commands.arguments import EXIT_CODES, TARGETS, add_common, add_compile
from commfuse_fx.commands.graph_sources import compiled_target, one_graph
from commfuse_fx.errors import ConfigKeyError
from commfuse_fx.inspect.explain.table import collectives_table
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.support.checks import alternatives

_DESCRIPTION = f"""\
Compile a step or a module for a virtual world, without devices or processes. Print the final graph as canonical text.

{TARGETS}
"""

_EPILOG = f"""\
examples:
  commfuse lower train.py:make
  commfuse lower package.models:make --devices 8 --fusion size=25 --collectives
  commfuse lower train.py:make --stage reduce_gradients | less
  commfuse lower train.py:make --dump before      # all stages, data and a report: before/rank0/

{EXIT_CODES}
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("target", metavar="TARGET", help="package.module:factory or path/to/file.py:factory")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the graph as JSON")
    form.add_argument("--collectives", action="store_true", help="print a table of the collectives")
    form.add_argument("--stage", metavar="NAME", help="print the graph after this pass; capture is before all passes")
    command.add_argument(
        "--dump", metavar="DIR", type=Path, help="write all stages to DIR/rank<r>/; prints that folder if nothing else"
    )
    add_compile(command)
    add_common(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    lowered = compiled_target(options.target, options)
    folder = None if options.dump is None else lowered.dump(options.dump)
    if options.json:
        print(one_graph(lowered).to_json().rstrip("\n"))
    elif options.collectives:
        for graph in lowered.graphs:
            sys.stdout.write(collectives_table(graph.program))
    elif options.stage is not None:
        sys.stdout.write(_stage(one_graph(lowered), options.stage))
    elif folder is not None:
        print(folder)
    else:
        sys.stdout.write(lowered.text())
    return 0


def _stage(lowered: Lowered, name: str) -> str:
    stages = lowered.stages
    if name not in stages:
        raise ConfigKeyError(f"--stage {name}: there is no such stage{alternatives(name, list(stages))}")
    return stages[name].text()
