"""`commfuse report TARGET|SAVED`: write a page about a step for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from commfuse_fx.commands.arguments import EXIT_CODES, SAVED, TARGETS, add_common, add_compile
from commfuse_fx.commands.graph_sources import compiled_or_saved, prices
from commfuse_fx.commands.output_files import check_report, write_result
from commfuse_fx.inspect.report.page import report

_DESCRIPTION = f"""\
Write one HTML file about a step: its graph by module, its collectives and the predicted timeline. It needs no network.

{TARGETS}

{SAVED}
"""

_EPILOG = f"""\
examples:
  commfuse report train.py:make --devices 8 --cluster gloo-1gbit
  commfuse report before/ --out before.html

{EXIT_CODES}
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("source", metavar="TARGET|SAVED", help="what to compile, or what was saved")
    command.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("report.html"), help="where to write it (default: %(default)s)"
    )
    command.add_argument("--force", action="store_true", help="replace FILE even if it is no report")
    add_compile(command)
    add_common(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    path = options.out
    check_report(path, "--out", options.force)
    lowered = compiled_or_saved(options)
    write_result(path, report(lowered, prices(options)), "--out")
    print(path)
    return 0
