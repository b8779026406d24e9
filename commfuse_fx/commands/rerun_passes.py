"""Run passes of choice over a saved graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commfuse_fx.config.plain_data import fusion_from_dict
from commfuse_fx.cost.priced import priced_for
from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.inspect.diff.load import GIVE, read_program
from commfuse_fx.inspect.dumps.files import INDEX, file_of_dump, folder_of_rank, is_folder, read_index
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.passes.declaration import Pass, PassContext, Situation
from commfuse_fx.planning.pipeline.pass_text import Written
from commfuse_fx.planning.pipeline.pass_values import GROUP, option_from_data
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.planning.pipeline.registry import PASSES, PassEntry, PassOption, find_pass


@dataclass(frozen=True)
class Input:
    """A saved graph. pipeline: what the compile ran on it, where its file says so; done: passes that it has been
    through, where a dump's index says so."""

    program: Program
    pipeline: PassPipeline | None
    done: tuple[str, ...]


def read_input(path: Path) -> Input:
    """The graph of a JSON file, or the captured graph of a dump. Raises ConfigValueError, as `load` does."""
    if is_folder(path, "FILE", GIVE):
        folder = folder_of_rank(path, "FILE", GIVE)
        index = read_index(folder, "FILE", GIVE)
        if "captured" not in index:
            raise ConfigValueError(f"{folder} has no captured graph, which passes begin with; give its graph.json")
        return Input(*read_program(file_of_dump(folder, index, "captured")), ())
    program, pipeline = read_program(path)
    return Input(program, pipeline, _done(path))


def price(program: Program, cluster: str) -> None:
    """Give the program another cluster. Raises as `compile` does for its option `cluster`."""
    specs = {name: param.whole or param.spec for name, param in program.params.items()}
    costs = priced_for(resolve_costs(cluster, "--cluster"), "cpu", program.mesh, specs)
    program.config = replace(program.config, cluster=costs)


def fuse(program: Program, text: str) -> None:
    """Give the program another comm_fusion. Raises as `compile` does for its option `comm_fusion`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigValueError(f"--comm-fusion is {text[:80]!r}, which is no JSON") from None
    program.config = replace(program.config, comm_fusion=fusion_from_dict(found, "--comm-fusion"))


def pipeline_for(given: Input, written: Written | None, done: Sequence[str]) -> PassPipeline:
    """The passes that are written, or those of the compile for None. Options that are not written are as in the
    compile, else as the configuration says.

    done: passes that the graph has been through. Raises ConfigKeyError, ConfigTypeError or ConfigValueError.
    """
    facts = dict.fromkeys(fact for name in done for fact in find_pass(name).ensures)
    usual = _usual(given)
    if written is None:
        if given.pipeline is None:
            raise ConfigValueError("the file does not say which passes the compile ran; give --passes")
        passes: Sequence[Pass] = given.pipeline.passes
    else:
        passes = [_make(find_pass(name), options, usual, given.program) for name, options in written]
    try:
        return PassPipeline(tuple(passes), tuple(facts), PassContext.of(given.program.config))
    except VerificationError as error:
        raise ConfigValueError(f"{error}; add the pass that ensures it, or name it in --after if it has run") from None


def _usual(given: Input) -> Mapping[str, Pass]:
    """The passes of the compile by name."""
    if given.pipeline is not None:
        return {item.name: item for item in given.pipeline.passes}
    config = given.program.config
    made = build_pipeline(Situation(config, given.program.mesh, by_autograd=bool(given.program.by_autograd))).passes
    return {item.name: item for item in made}


def _make(entry: PassEntry, options: Mapping[str, Any], usual: Mapping[str, Pass], program: Program) -> Pass:
    values = {name: option_from_data(entry, name, value, program) for name, value in options.items()}
    known: Any = usual.get(entry.name)
    if known is not None:
        changed: Pass = replace(known, **values)
        return changed
    for option in entry.options:
        if option.required and option.name not in values:
            values[option.name] = _required(entry, option, program)
    return entry.make(**values)


def _required(entry: PassEntry, option: PassOption, program: Program) -> Any:
    if option.name == GROUP:
        return program.mesh.all_axes
    raise ConfigValueError(f"pass {entry.name} needs the option {option.name}; write {entry.name}({option.name}=...)")


def _done(path: Path) -> tuple[str, ...]:
    """The passes that a dump's index says its graph.json has been through."""
    if not (path.parent / INDEX).is_file():
        return ()
    index = read_index(path.parent, "FILE", GIVE)
    if index.get("json") != path.name or not isinstance(index.get("stages"), list):
        return ()
    names = [stage.get("pass") for stage in index["stages"] if isinstance(stage, dict)]
    return tuple(name for name in names if isinstance(name, str) and name in PASSES)
