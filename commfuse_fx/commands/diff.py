"""`commfuse diff A B`: what differs between two compiled graphs, or two files of strategies."""

from __future__ import annotations

import argparse

from commfuse_fx.inspect.diff.diff_graphs import diff

SAME, DIFFERENT = 0, 1

_DESCRIPTION = """\
Compare two compiled graphs: align their nodes, then say what differs, from a renamed node to a changed bucket.

A and B are each a folder that lowered.dump() wrote, the folder of one rank in it, its graph.json, or a file of
canonical text (graph.txt, or one of stages/). Or both are files that strategy_ckpt_save_file has written: then the
entries of parameters and ops are compared.
"""

_EPILOG = """\
example:
  step.lower(x, y).dump("before")     # in Python; then change the model or the options, and dump to "after"
  commfuse diff before after
  commfuse diff before after --markdown > comment.md
  commfuse diff strategies-of-main.json strategies.json
  commfuse diff before/rank0/stages/00-capture.txt before/rank0/graph.txt

exit codes: 0 the same, 1 different, 2 bad usage, or a file that cannot be read
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("a", metavar="A", help="the graph, or the strategies, before")
    command.add_argument("b", metavar="B", help="the same after")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument(
        "--markdown", action="store_true", help="print it for a comment on a pull request, with details folded"
    )
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = diff(options.a, options.b)
    if options.json:
        print(found.to_json())
    elif options.markdown:
        print(found.markdown(), end="")
    else:
        print(found.text(), end="")
    return SAME if found.is_same else DIFFERENT
