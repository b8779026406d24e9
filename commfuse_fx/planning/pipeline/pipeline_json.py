"""What a compile began with, as plain data: the captured program, the marks, and the passes that then ran."""

from __future__ import annotations

from typing import Any

from commfuse_fx.errors import CommFuseError, ConfigValueError
from commfuse_fx.ir.core.placement import Placement
from commfuse_fx.ir.core.program import Layouts, Program
from commfuse_fx.ir.json.write import to_dict
from commfuse_fx.ir.ops.values import ValueReader
from commfuse_fx.passes.declaration import Pass, PassContext
from commfuse_fx.planning.pipeline.pass_values import option_from_data, options_to_dict
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.pipeline.registry import PASSES, find_pass
from commfuse_fx.sharding.marking.marks_json import marks_from_dict, marks_to_dict
from commfuse_fx.support.checks import show
from commfuse_fx.support.json_fields import Fields, dump_text

KEY = "pipeline"
"""Where the passes stand in captured.json."""

MARKS, LAYOUTS = "marks", "layouts"
"""Where it has those of the program, if it has any."""


def captured_json(captured: Program, pipeline: PassPipeline | None) -> str:
    """The JSON of a program as captured, with the pipeline that the compile then ran, if every pass of it has a name in
    the registry. `from_json` reads the program, `read_marks` its marks and layouts, `pipeline_of` the pipeline."""
    data = to_dict(captured)
    if captured.marks is not None:
        data[MARKS] = marks_to_dict(captured.marks)
    if captured.layouts is not None:
        data[LAYOUTS] = {
            name: [[group, str(placement)] for group, placement in layout] for name, layout in captured.layouts.items()
        }
    if pipeline is not None and all(item.name in PASSES for item in pipeline.passes):
        data[KEY] = [pass_to_dict(item) for item in pipeline.passes]
    return dump_text(data)


def pass_to_dict(item: Pass) -> dict[str, Any]:
    """`{"pass": name, "options": {...}}`."""
    return {"pass": item.name, "options": options_to_dict(find_pass(item.name), item)}


def read_marks(data: dict[str, Any], program: Program, where: str) -> None:
    """Give the program the marks and layouts that a captured.json holds. Raises ConfigValueError, naming `where`."""
    if MARKS in data:
        program.marks = marks_from_dict(data[MARKS], where)
    if LAYOUTS in data:
        program.layouts = _layouts(data, where)


def _layouts(data: dict[str, Any], where: str) -> Layouts:
    reader = ValueReader(where)
    found: dict[str, tuple[tuple[str, Placement], ...]] = {}
    for name, pairs in reader.get(data, LAYOUTS, dict, "the file").items():
        place = f"{LAYOUTS}.{name[:80]}"
        layout: list[tuple[str, Placement]] = []
        for i, pair in enumerate(reader.typed(pairs, list, place)):
            if not isinstance(pair, list) or len(pair) != 2:
                raise reader.error(f"{place}[{i}]", f"{show(pair)} is not [group, placement]")
            layout.append((reader.typed(pair[0], str, place), reader.placement(pair[1], place)))
        found[name] = tuple(layout)
    return found


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
        return PassPipeline(tuple(passes), context=PassContext.of(program.config))
    except CommFuseError as error:
        raise ConfigValueError(f"{where}, {KEY}: {error}; write the dump again") from None
