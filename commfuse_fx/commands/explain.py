"""`commfuse explain TARGET|SAVED`: why a graph is as it is."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from commfuse_fx.commands.arguments import EXIT_CODES, SAVED, TARGETS, add_common, add_compile
from commfuse_fx.commands.graph_sources import compiled_or_saved, prices
from commfuse_fx.inspect.explain.explanation import Explanation
from commfuse_fx.inspect.explain.rank_memory import RankMemory

_DESCRIPTION = f"""\
Say why a graph is as it is: its buckets, merges that were illegal, parameters that are not reduced; and for each
collective how much of it is predicted to be hidden behind compute, and why the rest is not. With --memory, say how many
bytes of parameters, gradients and optimizer state each rank holds, and how many it would hold if nothing were divided.

{TARGETS}

{SAVED}
"""

_EPILOG = f"""\
examples:
  commfuse explain train.py:make --devices 8 --fusion optimal --cluster gloo-10gbit
  commfuse explain before/                        # what lowered.dump("before") has written
  commfuse explain before/ --cluster gloo-1gbit   # the same graph, priced for another cluster
  commfuse explain train.py:make --devices 8 --set enable_parallel_optimizer=true --memory

{EXIT_CODES}
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("source", metavar="TARGET|SAVED", help="what to compile, or what was saved")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.add_argument("--memory", action="store_true", help="print what each rank holds instead, in bytes")
    command.add_argument("--timings", action="store_true", help="also list the passes that changed the graph")
    add_compile(command)
    add_common(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    explanation = compiled_or_saved(options).explain(prices(options), options.timings)
    found: Explanation | RankMemory = explanation.memory if options.memory else explanation
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        sys.stdout.write(found.text())
    return 0
