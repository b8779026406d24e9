"""The command line: `commfuse COMMAND`, or `python -m commfuse_fx COMMAND`.

Exit codes: 0 done, 1 failed (or, for a comparison, different), 2 bad usage or a bad file, 130 interrupted. Results go
to stdout, messages to stderr. Under torchrun rank 0 runs the command, and the other ranks end at once; commands that
need all ranks say so (`on_all_ranks`).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from commfuse_fx import __version__
from commfuse_fx.commands.completion import SHELLS, completion
from commfuse_fx.commands.console import rank, say, text_of
from commfuse_fx.errors import CommFuseError, ConfigKeyError, ConfigTypeError, ConfigValueError

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

_COMMANDS = {
    "lower": "compile a step and print its graph",
    "explain": "say why a graph is as it is",
    "simulate": "predict the time of a step",
    "auto": "search strategies of a step, and compare the plans",
    "report": "write a page about a step for a browser",
    "diff": "compare two compiled graphs",
    "opt": "run passes over a saved graph",
    "calibrate": "measure the network and the devices of the running ranks",
    "demo": "train a small network on handwritten digits, and show what was compiled",
}
"""Modules of `commfuse_fx.commands` and what each does, in the order of --help. A module is imported when its command
is named: most need torch, which takes seconds."""

_DESCRIPTION = """\
Tools of commfuse-fx, a graph compiler for distributed training in PyTorch. Each command has its own --help, with
examples.
"""

_EPILOG = """\
examples:
  commfuse demo
  commfuse lower train.py:make --devices 8 --collectives
  commfuse simulate train.py:make --devices 8 --cluster gloo-1gbit
  commfuse diff before/ after/
  eval "$(commfuse --print-completion bash)"

exit codes: 0 done, 1 failed (diff: different), 2 bad usage or a file that cannot be read, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed or different, 2 bad usage, 130 interrupted.

    argv: the arguments. None: those of the process, which then ends here if a command fails amid collectives.
    """
    try:
        parser = _parser()
        options = parser.parse_args(argv)
    except SystemExit as done:  # --help, or bad usage
        return int(done.code or 0)
    except KeyboardInterrupt:  # while a command is imported, which takes seconds
        say("interrupted")
        return INTERRUPTED
    if options.version:
        if rank() == 0:
            print(f"commfuse {__version__} (torch {version('torch')})")
        return DONE
    if options.print_completion is not None:
        print(completion(parser, options.print_completion), end="")
        return DONE
    if not hasattr(options, "run"):
        parser.print_help()
        return DONE
    code = _run(options)
    if code != DONE and argv is None and _is_distributed():
        # Collectives may be unfinished. Gloo's threads then free their tensors while the interpreter ends, which
        # aborts the process with another exit code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(options: argparse.Namespace) -> int:
    if rank() != 0 and not options.on_all_ranks:
        return DONE
    try:
        try:
            code: int = options.run(options)
            sys.stdout.flush()  # here, where a reader that has gone is noticed
            return code
        except BrokenPipeError:
            _forget_stdout()
            return FAILED
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what a user's model raises, such as SystemExit
            return _fail(options, error)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _is_distributed() -> bool:
    """Whether a command has joined other ranks. Does not import torch where none has."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _forget_stdout() -> None:
    """Nobody reads it any more, as after `| head`: what is left of it is dropped without an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(options: argparse.Namespace, error: BaseException) -> int:
    if options.traceback:
        traceback.print_exception(error)
    text = text_of(error) or type(error).__name__
    if isinstance(error, (ConfigKeyError, ConfigTypeError, ConfigValueError)):
        say(text)
        return BAD_USAGE
    if not isinstance(error, CommFuseError):  # whose texts are made to be read in full
        text = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    where = f"rank {rank()}: " if _is_distributed() else ""
    print(f"commfuse: {where}{type(error).__name__}: {text} (--traceback shows where)", file=sys.stderr)
    return FAILED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong once, not on every rank."""

    def error(self, message: str) -> NoReturn:
        if rank() == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(BAD_USAGE)

    def print_help(self, file: Any = None) -> None:
        if rank() == 0:
            super().print_help(file)


class _CommandParser(_Parser):
    """The parser of one command: `load` asks its module what it takes."""

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module = module

    def load(self) -> None:
        module, self._module = self._module, ""
        if module:
            import_module(f"commfuse_fx.commands.{module}").register(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(None if args is None else self._with_values(args), namespace)

    def _with_values(self, args: Sequence[str]) -> list[str]:
        """An argument behind an option that takes one is its value, also one with a dash in front that is no option, as
        in `--memory -1GiB`: argparse says that a value is missing there, and not which one is wrong."""
        found: list[str] = []
        for arg in args:
            before = self._option_string_actions.get(found[-1]) if found else None
            takes_one = before is not None and before.nargs is None
            if takes_one and arg.startswith("-") and arg not in self._option_string_actions and "--" not in found:
                found[-1] += f"={arg}"
            else:
                found.append(arg)
        return found


def _parser() -> _Parser:
    parser = _Parser(
        prog="commfuse",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the versions of commfuse and of torch")
    parser.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help="print a completion script for bash or zsh"
    )
    parser.set_defaults(on_all_ranks=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_CommandParser)
    for name, does in _COMMANDS.items():
        commands.add_parser(name, module=name, help=does, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser
