"""`commfuse opt FILE`: run passes over a saved graph."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commfuse_fx.commands.rerun_passes import fuse, pipeline_for, price, read_input
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.planning.pipeline.pass_text import parse_passes
from commfuse_fx.planning.pipeline.pass_values import default_text, hint_of
from commfuse_fx.planning.pipeline.pipeline import PassRecord
from commfuse_fx.planning.pipeline.registry import PASSES, PassEntry, find_pass

DONE = 0

_DESCRIPTION = """\
Run passes over a saved graph and print the result: canonical text, or JSON that can be read again.

FILE is a folder that lowered.dump() wrote, of which the captured graph is taken, or a JSON file of it: captured.json,
the graph before all passes, or graph.json, the final one. Nothing runs but the passes: no model, no device is needed.
"""

_EPILOG = """\
--passes is a list such as simplify,lower_user_collectives,reduce_gradients(mean=false). Options that are not given are
as they were in the compile. Without --passes the passes of the compile run again. A value is JSON, or a word.

example:
  step.lower(x, y).dump("dump")       # in Python
  commfuse opt --list                 # the passes, their options, what they require and ensure
  commfuse opt dump                   # the whole compile again
  commfuse opt dump --print after-changed 2> stages.txt
  commfuse opt dump --passes 'simplify,lower_user_collectives,reduce_gradients(mean=false)' --json > reduced.json
  commfuse opt reduced.json --after lower_user_collectives,reduce_gradients --verify --passes 'update_parameters,
    fuse_collectives,flatten_storage' --comm-fusion '{"allreduce": {"mode": "size", "config": 25}}'

exit codes: 0 done, 1 a pass failed, 2 bad usage, or a file that cannot be read
"""


def register(command: argparse.ArgumentParser) -> None:
    """Tell the parser of this command what it takes."""
    command.description, command.epilog = _DESCRIPTION, _EPILOG
    command.add_argument("file", metavar="FILE", nargs="?", help="the graph, or a dump with it")
    command.add_argument("--passes", metavar="LIST", help="what to run (default: the passes of the compile)")
    command.add_argument(
        "--after",
        metavar="LIST",
        default="",
        help="passes that the graph has been through, so that others may build on them; of the graph.json of a dump "
        "they are known",
    )
    command.add_argument("--cluster", help="what passes price plans with: a preset or a JSON file, as for compile()")
    command.add_argument("--comm-fusion", metavar="JSON", help="what passes fuse, as for compile()")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--verify", action="store_true", help="check the graph after every pass")
    command.add_argument(
        "--print",
        choices=("after-all", "after-changed"),
        dest="shown",
        help="print the text after every pass, or every one that changed something, to stderr",
    )
    command.add_argument("--list", action="store_true", help="list the passes, and do nothing else")
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.list:
        print("\n".join(_described(entry) for entry in PASSES.values()), end="")
        return DONE
    if options.file is None:
        raise ConfigValueError("opt needs a FILE: a folder that Lowered.dump wrote, or a JSON file in it; or --list")
    written = None if options.passes is None else parse_passes(options.passes)
    done = [name for name, _ in parse_passes(options.after, "--after")] if options.after else []
    for name in (*done, *(name for name, _ in written or ())):
        find_pass(name)  # a name that is wrong should not wait for a large file
    given = read_input(Path(options.file))
    program = given.program
    if options.cluster is not None:
        price(program, options.cluster)
    if options.comm_fusion is not None:
        fuse(program, options.comm_fusion)
    pipeline = pipeline_for(given, written, [*given.done, *done])
    watcher = None if options.shown is None else _Printer(options.shown == "after-all")
    pipeline.run(program, verify if options.verify else None, watcher=watcher)
    print(to_json(program) if options.json else canonical_text(program), end="")
    return DONE


class _Printer:
    """Prints the graph after passes to stderr."""

    def __init__(self, unchanged_too: bool) -> None:
        self.unchanged_too = unchanged_too

    def before(self, name: str, program: Program) -> None:
        """Nothing is printed before a pass."""

    def after(self, record: PassRecord, program: Program) -> None:
        if record.name in PASSES and (record.modified or self.unchanged_too):
            what = "changed" if record.modified else "unchanged"
            print(f"### after {record.name}: {what}\n{canonical_text(program)}", end="", file=sys.stderr)

    def failed(self, name: str, error: Exception) -> None:
        print(f"### {name} failed", file=sys.stderr)


def _described(entry: PassEntry) -> str:
    lines = [entry.name, f"  {entry.purpose}", f"  stage: {entry.stage}"]
    for label, facts in (("requires", entry.requires), ("ensures", entry.ensures)):
        if facts:
            lines.append(f"  {label}: {', '.join(facts)}")
    for option in entry.options:
        default = "as in the compile" if option.required else default_text(option)
        lines.append(f"  option {option.name}: {hint_of(option)} (default: {default})")
    return "\n".join(lines) + "\n"
