"""A pipeline as plain data: which passes a compile ran, with which options."""

from __future__ import annotations

from typing import Any

from commfuse_fx.errors import CommFuseError, ConfigValueError
from commfuse_fx.ir.json.write import to_dict
from commfuse_fx.ir.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning.pass_values import option_from_data, options_to_dict
from commfuse_fx.planning.pipeline import PassPipeline
from commfuse_fx.planning.registry import PASSES, find_pass
from commfuse_fx.support.json_fields import Fields, dump_text

KEY = "pipeline"
"""Where it stands in captured.json."""


def captured_json(captured: Program, pipeline: PassPipeline | None) -> str:
    """The JSON of a program as captured, with the pipeline that the compile then ran, if every pass of it has a name in
    the registry. `from_json` reads the program, `pipeline_of` the pipeline."""
    data = to_dict(captured)
    if pipeline is not None and all(item.name in PASSES for item in pipeline.passes):
        data[KEY] = [pass_to_dict(item) for item in pipeline.passes]
    return dump_text(data)


def pass_to_dict(item: Pass) -> dict[str, Any]:
    """`{"pass": name, "options": {...}}`."""
    return {"pass": item.name, "options": options_to_dict(find_pass(item.name), item)}


def pipeline_of(data: dict[str, Any], program: Program, where: str) -> PassPipeline | None:
    """The pipeline that a captured.json holds, for its program; None where it holds none.

    Raises ConfigValueError, naming `where` and the pass.
    """
    if KEY not in data:
        return None
    reader = Fields(where)
    passes: list[Pass] = []
    for i, record in enumerate(reader.items(data, KEY, dict, "the file")):
        place = f"{KEY}[{i}]"
        name = reader.get(record, "pass", str, place)
        options = reader.get(record, "options", dict, place)
        try:
            entry = find_pass(name)
            values = {key: option_from_data(entry, key, value, program) for key, value in options.items()}
            passes.append(entry.make(**{option.name: values[option.name] for option in entry.options}))
        except KeyError as error:
            raise reader.error(place, f"{name[:40]!r} lacks an option, or is unknown ({error})") from None
        except CommFuseError as error:
            raise ConfigValueError(f"{where}, {place}: {error}; write the dump again") from None
    try:
        return PassPipeline(tuple(passes))
    except CommFuseError as error:
        raise ConfigValueError(f"{where}, {KEY}: {error}; write the dump again") from None
