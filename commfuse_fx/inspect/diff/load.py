"""Read a compiled step back from the files that `Lowered.dump` or `Lowered.to_json` wrote."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.inspect.diff.read_text import read_text
from commfuse_fx.inspect.diff.records import CollectiveRecord
from commfuse_fx.inspect.dumps.files import INDEX, file_of_dump, folder_of_rank, is_folder, read_index
from commfuse_fx.inspect.lowered import Lowered, LoweredCall
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import CollectiveInfo
from commfuse_fx.ir.core.naming import parameter_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.json.read import from_dict
from commfuse_fx.ir.json.write import SCHEMA
from commfuse_fx.ir.ops.values import ValueReader
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.planning.compiled import Compiled, Snapshot
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.pipeline.pipeline_json import pipeline_of, read_marks
from commfuse_fx.support.json_fields import DUMP, Fields
from commfuse_fx.support.read_file import read_file
from commfuse_fx.support.strict_json import parse_object
from commfuse_fx.support.tracebacks import user_frames_only

GIVE = "give a folder that Lowered.dump wrote, the folder of one rank in it, or its graph.json"

_STAGE = re.compile(r"stages/[A-Za-z0-9_-]{1,120}\.txt", re.ASCII)
_GROUP = re.compile(r"(.*)\(\d+\)")

Stages = Mapping[str, Snapshot]


@user_frames_only
def load(path: str | os.PathLike[str]) -> Lowered:
    """Read a compiled step that was saved. It can be read, simulated, explained, compared and dumped again.

    path: a folder that `Lowered.dump` wrote (of several ranks the first is read), the folder of one rank, or a
        file of `Lowered.to_json`.

    Everything is as before, but for what is not in files: how long passes took, the values of constants, and
    model and optimizer, so that `cf.lockstep` refuses it. The `stages` of a folder are made by running its
    passes again, where it has a captured.json and this version makes the same graph of it. Else they are read
    from its texts, where the collectives of `cf.ops` have the index -1. A file alone has one stage, "graph".

    Nothing that a file names is imported or run. Raises ConfigTypeError for what is no path. Raises
    ConfigValueError, naming the file, the place and what to do, for what is missing, damaged or of a newer
    schema.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ConfigTypeError(f"path is {path!r:.100}; {GIVE}")
    place = Path(path)
    if is_folder(place, "path", GIVE):
        return _load_folder(folder_of_rank(place, "path", GIVE))
    program = read_program(place)[0]
    rank = 0 if program.mesh.devices is None else program.mesh.devices[0]
    return _lowered(program, rank, lambda: {"graph": _snapshot("graph", program)})


def read_program(path: Path) -> tuple[Program, PassPipeline | None]:
    """The program of a JSON file, and the pipeline that is written in it, if there is one. Raises ConfigValueError."""
    data = parse_object(read_file(path, "path", GIVE), str(path), SCHEMA, DUMP)
    program = from_dict(data, str(path))
    read_marks(data, program, str(path))
    return program, pipeline_of(data, program, str(path))


def _load_folder(folder: Path) -> Lowered:
    index = read_index(folder, "path", GIVE)
    place = folder / INDEX
    fields = Fields(str(place))
    program = read_program(file_of_dump(folder, index, "json"))[0]
    digest = hashlib.sha256(canonical_text(program).encode()).hexdigest()
    if fields.get(index, "fingerprint", str, "the file") != digest:
        raise fields.error("fingerprint", f"{index['json']} is another graph than the one that was dumped here")
    rank = fields.get(index, "rank", int, "the file")
    if rank not in (range(program.mesh.world) if program.mesh.devices is None else program.mesh.devices):
        raise fields.error("rank", f"the mesh {program.mesh} has no rank {rank}")
    texts = _Texts(folder, fields.items(index, "stages", dict, "the file"), program, fields)
    captured, pipeline = None, None
    if "captured" in index:
        captured, pipeline = read_program(file_of_dump(folder, index, "captured"))
    if captured is None or pipeline is None:
        return _lowered(program, rank, texts.read, captured)
    compiled = Compiled(program, captured, pipeline, [], 0.0)
    return _lowered(program, rank, _Replay(compiled, digest, texts).read, captured, pipeline)


def _lowered(
    program: Program,
    rank: int,
    stages: Callable[[], Stages],
    captured: Program | None = None,
    pipeline: PassPipeline | None = None,
) -> Lowered:
    return Lowered(program, rank, (), stages, LoweredCall(None, (), {}), captured, pipeline)


def _snapshot(name: str, program: Program) -> Snapshot:
    return Snapshot(name, True, canonical_text(program), tuple(map(collective_of, program.collectives())))


@dataclass(frozen=True)
class _Replay:
    """The stages, made by the passes; those of the texts where the passes of this version make another graph."""

    compiled: Compiled
    fingerprint: str
    texts: _Texts

    def read(self) -> Stages:
        try:
            found = self.compiled.replay()
        except Exception:  # the graph or the pipeline was edited, or the passes of this version refuse it
            return self.texts.read()
        last = found[[*found][-1]].text()
        same = hashlib.sha256(last.encode()).hexdigest() == self.fingerprint
        return found if same else self.texts.read()


@dataclass(frozen=True)
class _Texts:
    """The stages as they were written."""

    folder: Path
    records: list[dict[str, Any]]
    program: Program
    fields: Fields

    def read(self) -> Stages:
        found: dict[str, Snapshot] = {}
        for i, record in enumerate(self.records):
            place = f"stages[{i}]"
            name = self.fields.get(record, "pass", str, place)
            file = self.fields.get(record, "file", str, place)
            if not _STAGE.fullmatch(file):
                raise self.fields.error(f"{place}.file", f"{file[:80]!r} is no file of stages/")
            text = read_file(self.folder / file, "path", GIVE)
            modified = self.fields.get(record, "modified", bool, place)
            found[name] = Snapshot(name, modified, text, self._collectives(text, str(self.folder / file)))
        return found

    def _collectives(self, text: str, label: str) -> tuple[CollectiveInfo, ...]:
        nodes = read_text(text, label).nodes
        return tuple(self._collective(node.collective, label) for node in nodes if node.collective is not None)

    def _collective(self, record: CollectiveRecord, label: str) -> CollectiveInfo:
        params = [self.program.params.get(parameter_of(name)) for name in record.members]
        numbers = [param.sequence for param in params if param is not None]
        of_params = bool(numbers) and len(numbers) == len(params)
        group = _GROUP.fullmatch(record.group)
        return CollectiveInfo(
            kind=record.kind,
            group=group[1] if group else record.group,
            dtype=ValueReader(label).dtype(record.dtype, "a collective"),
            nbytes=record.nbytes,
            members=record.members,
            sequence=min(numbers) if of_params else -1,
            reduce_op=record.reduce_op or None,
            fusion_id=record.fusion_id,
            role="gradient" if of_params else "user",
        )
