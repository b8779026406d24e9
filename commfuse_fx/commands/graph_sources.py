"""What a command works on: a target, which it compiles, or a saved graph."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from commfuse_fx.api import compile
from commfuse_fx.commands.arguments import compile_options, refuse_compile_options
from commfuse_fx.commands.targets import load_target
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.load import load
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.inspect.lowered_graphs import LoweredGraphs


def compiled_target(text: str, options: argparse.Namespace) -> Lowered | LoweredGraphs:
    """Make the target and compile it with the options of `add_compile`. Raises what either raises."""
    wanted = compile_options(options)  # before the target's code runs
    target = load_target(text)
    with redirect_stdout(sys.stderr):  # the model may print while it is traced
        step = compile(target.model, loss_fn=target.loss_fn, optimizer=target.optimizer, **wanted)
        lowered: Lowered | LoweredGraphs = step.lower(*target.args, **target.kwargs)
    return lowered


def compiled_or_saved(options: argparse.Namespace) -> Lowered:
    """What `options.source` names: a path that exists is a saved graph, anything else a target.

    Raises ConfigValueError for what is neither, and what reading or compiling it raises.
    """
    text = options.source
    if Path(text).exists():
        if text.endswith(".py"):
            raise ConfigValueError(f"{text!r} names no function: give {text}:factory")
        refuse_compile_options(options)
        return load(text)
    if ":" not in text:
        raise ConfigValueError(
            f"there is no {text!r}: give a folder that lowered.dump() wrote, or a target such as package.module:factory"
        )
    return one_graph(compiled_target(text, options))


def one_graph(found: Lowered | LoweredGraphs) -> Lowered:
    """Raises ConfigValueError for a model that Dynamo has cut into several graphs."""
    if isinstance(found, Lowered):
        return found
    raise ConfigValueError(
        f"Dynamo cuts the model into several graphs ({', '.join(found.named())}), and this takes one: write them with "
        "commfuse lower TARGET ... --dump DIR, and give a folder such as DIR/graph-00"
    )


def prices(options: argparse.Namespace) -> str | None:
    """What explain() and simulate() are given: a saved graph is priced for --cluster, a target was compiled for it."""
    cluster: str | None = options.cluster
    return cluster
