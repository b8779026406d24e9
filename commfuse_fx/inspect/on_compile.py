"""What is told of every compile: log messages, files under COMMFUSE_DUMP, artifacts of torch's structured trace."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.explain.table import collectives_table
from commfuse_fx.inspect.lowered import lowered_of
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.program import LAYOUT
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.support.logs import logger
from commfuse_fx.support.torch_trace import is_tracing, write_artifact
from commfuse_fx.support.writing import problem_with

VARIABLE = "COMMFUSE_DUMP"
"""The folder to which every compile is dumped, as NNN-train/rank<r> or NNN-eval/rank<r>."""

_TRACE, _PASSES, _PLAN = logger("trace"), logger("passes"), logger("plan")
_COLLECTIVES, _SHARDING = logger("collectives"), logger("sharding")
_log = logging.getLogger("commfuse_fx.dump")

_dumped: dict[str, int] = {}  # folder -> compiles of this process in it
_traced = count()
_warned = False


@dataclass(frozen=True)
class Publisher:
    """Tells of the compiles of one rank."""

    rank: int

    def keeps_captured(self) -> bool:
        """Whether every compile is dumped, for which the graph as captured has to be kept."""
        return bool(os.environ.get(VARIABLE))

    def __call__(self, compiled: Compiled) -> None:
        """Log what was compiled, and write it where files are asked for. A file that cannot be written is a warning."""
        _log_compile(compiled)
        _save_strategies(compiled, self.rank)
        if self.keeps_captured():
            _dump(compiled, self.rank)
        if is_tracing():
            number, lowered = next(_traced), lowered_of(compiled, self.rank)
            name = f"commfuse_{number:03d}_{_mode(compiled)}"
            write_artifact(f"{name}_graph", lowered.text)
            write_artifact(f"{name}_explain", lambda: lowered.explain().text())


def check_files(config: CompileConfig, rank: int) -> None:
    """Raises ConfigValueError where a file that a search is to write cannot be written, ahead of the search."""
    path = config.strategy_ckpt_save_file
    problem = "" if path is None or rank else problem_with(Path(path), "strategy_ckpt_save_file")
    if problem:
        raise ConfigValueError(problem)


def _save_strategies(compiled: Compiled, rank: int) -> None:
    """Write what was searched for the first training step, on rank 0: those for other shapes follow from it."""
    program = compiled.program
    path = program.config.strategy_ckpt_save_file
    is_first = program.training and program.layouts is None
    if path is None or rank or not is_first or not isinstance(program.strategies, Strategies):
        return
    try:
        program.strategies.save(path)
    except OSError as error:
        raise ConfigValueError(
            f"strategy_ckpt_save_file={str(path)!r} cannot be written: {error.strerror or error}; give another path"
        ) from error


def _mode(compiled: Compiled) -> str:
    return "train" if compiled.program.training else "eval"


def _log_compile(compiled: Compiled) -> None:
    program, records = compiled.program, compiled.records
    if records:
        _TRACE.debug(
            "captured the %s step: %d nodes, %.1f ms",
            _mode(compiled),
            records[0].nodes_before,
            compiled.capture_seconds * 1e3,
        )
    for record in records:
        _PASSES.debug(
            "pass %s: %s, %d -> %d nodes, %.1f ms",
            record.name,
            "modified" if record.modified else "unchanged",
            record.nodes_before,
            record.nodes_after,
            record.seconds * 1e3,
        )
    if _PLAN.isEnabledFor(logging.DEBUG):
        _PLAN.debug("%s", _plan_text(compiled))
    if program.config.divides_graphs and _SHARDING.isEnabledFor(logging.DEBUG):
        _SHARDING.debug("%s", _layouts_text(compiled))
    if _COLLECTIVES.isEnabledFor(logging.DEBUG):
        _COLLECTIVES.debug("of the %s step\n%s", _mode(compiled), collectives_table(program).rstrip("\n"))


def _layouts_text(compiled: Compiled) -> str:
    program = compiled.program
    laid = [f"  {note.subject}: {note.reason}" for note in program.notes if note.topic == LAYOUT]
    moved = sum(each.nbytes for each in program.redistributions)
    return "\n".join(
        [f"layouts; {len(program.redistributions)} redistribution(s) of tensors of {moved} bytes together", *laid]
    )


def _plan_text(compiled: Compiled) -> str:
    program = compiled.program
    found = [collective_of(node) for node in program.collectives()]
    sent = sum(each.nbytes for each in found)
    seconds = compiled.capture_seconds + sum(record.seconds for record in compiled.records)
    lines = [
        f"the {_mode(compiled)} step: {len(program.graph.nodes)} nodes, {len(found)} collective(s) of {sent} bytes, "
        f"capture and {len(compiled.records)} passes in {seconds * 1e3:.1f} ms"
    ]
    lines += [f"  {note.topic}: {note.subject}: {note.reason}" for note in program.notes if note.topic != LAYOUT]
    return "\n".join(lines)


def _dump(compiled: Compiled, rank: int) -> None:
    directory = os.environ[VARIABLE]
    number = _dumped.get(directory, 0)
    _dumped[directory] = number + 1
    try:
        lowered_of(compiled, rank).dump(Path(directory) / f"{number:03d}-{_mode(compiled)}")
    except Exception as error:  # of a tool that looks on: the run goes on
        _warn_once(error)


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _log.warning("%s: %s: %s; there are no more warnings about this", VARIABLE, type(error).__name__, error)
    _warned = True
