"""Reads a program from the JSON that `ir.json.write` makes. A file is data: nothing that it names is imported or run.

The program is whole: passes, simulation and explanation give what they gave before it was saved. Values are not in a
file, so constants are meta tensors, and the program cannot be run.

Why: docs/decisions.md, "A graph in a file is data, and verifies".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from commfuse_fx.config.plain_data import config_from_dict
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import PHASES, CollectiveInfo, NodeInfo, Part, Stretch, info, set_info
from commfuse_fx.ir.core.naming import Names
from commfuse_fx.ir.core.program import ModuleResult, Note, Program, Redistribution, Source, Update
from commfuse_fx.ir.json.check import check_saved
from commfuse_fx.ir.json.facts import FactReader
from commfuse_fx.ir.json.write import SCHEMA
from commfuse_fx.ir.ops.known_ops import check_call, find_any, find_target
from commfuse_fx.ir.ops.values import ArgumentReader
from commfuse_fx.support.json_fields import DUMP, LARGEST
from commfuse_fx.support.strict_json import parse_object

_SOURCES = ("parameter", "buffer", "input", "flat", "state", "hyper", "seed", "gradient")
_OWNED = ("flat", "state", "hyper")
_CONSTANT = re.compile(r"[A-Za-z_]\w{0,199}", re.ASCII)


def from_json(text: str, where: str = "the JSON", *, any_op: bool = False) -> Program:
    """Read the program that `to_json` wrote: its text, its JSON, and what passes make of it are the same again.

    text: the JSON. Its size is bounded.
    where: what errors call it, such as the path of the file.
    any_op: also reads ops that this process does not know; passes cannot run on such a program.

    Constants are meta tensors, since their values are not saved.

    Raises ConfigValueError, naming `where`, the place and what to do, for anything else: no JSON, another
    schema, a missing key, a value of another type, a reference to no node, an op that graphs may not call,
    contradictions.
    """
    return from_dict(parse_object(text, where, SCHEMA, DUMP), where, any_op=any_op)


def from_dict(data: Mapping[str, Any], where: str, *, any_op: bool = False) -> Program:
    """The same for JSON that is parsed; keys at the top that are not the program's are not looked at."""
    program = _Reader(data, where, find_any if any_op else find_target).read()
    check_saved(program, data, where)
    return program


class _Reader(ArgumentReader):
    def __init__(self, data: Mapping[str, Any], label: str, find: Callable[[str], Any]) -> None:
        super().__init__(label)
        self.data = data
        self.find = find
        self.graph = fx.Graph()
        self.facts = FactReader(label)
        self.inputs: dict[fx.Node, Source] = {}
        self.places: list[tuple[fx.Node, dict[str, Any], str]] = []

    def read(self) -> Program:
        header = self.get(self.data, "header", dict, "the file")
        body: dict[str, Any] = self.get(self.data, "program", dict, "the file")
        records = self.items(self.data, "nodes", dict, "the file")
        self.mesh = self.read_mesh(self.get(body, "mesh", dict, "program"), "program.mesh")
        self.constants = {
            name: self.constant(spec, f"program.constants.{name[:80]}")
            for name, spec in self.get(body, "constants", dict, "program").items()
        }
        if not records or records[-1].get("op") != "output":
            raise self.error("nodes", 'the last one is not the "output"')
        for i, record in enumerate(records):
            self.node(record, self.place_of(i, record))
        for node, record, place in self.places:
            self.link(node, record, place)
        params = self.facts.params(self.items(body, "parameters", dict, "program"), "program.parameters")
        optimizer = self.get(body, "optimizer", dict, "program", None)
        return Program(
            graph=self.graph,
            mesh=self.mesh,
            config=config_from_dict(self.get(body, "config", dict, "program"), f"{self.label}, program.config"),
            params=params,
            sources=self.sources(self.items(body, "inputs", str, "program")),
            training=self.get(body, "training", bool, "program"),
            loss=self.reference(body.get("loss"), "program.loss"),
            constants=self.constants,
            names=self.names(self.get(body, "names", dict, "program")),
            grads={
                name: self.reference(value, f"program.gradients.{name[:80]}")
                for name, value in self.get(body, "gradients", dict, "program").items()
            },
            aux={
                name: self.reference(value, f"program.aux.{name[:80]}")
                for name, value in self.get(body, "aux", dict, "program", {}).items()
            },
            optimizer=None if optimizer is None else self.facts.optimizer(optimizer, "program.optimizer"),
            updates=self.updates(self.items(body, "updates", dict, "program")),
            notes=[Note(*texts) for texts in self.rows(body, "notes", (str, str, str))],
            redistributions=[
                Redistribution(*fields) for fields in self.rows(body, "redistributions", (str, str, str, str, int, str))
            ],
            module_results=self.module_results(body),
            batch_axes=self.axes(self.get(body, "batch_axes", str, "program"), "program.batch_axes"),
            batch_inputs=tuple(self.items(body, "batch_inputs", str, "program", [])),
            own_buffers=tuple(self.items(body, "own_buffers", str, "program", [])),
            by_autograd=self.get(body, "by_autograd", str, "program", ""),
            torch_version=self.get(header, "torch", str, "header"),
        )

    def module_results(self, body: dict[str, Any]) -> list[ModuleResult]:
        if "module_results" not in body:
            return []
        return [ModuleResult(*fields) for fields in self.rows(body, "module_results", (str, str, int, str))]

    def place_of(self, i: int, record: dict[str, Any]) -> str:
        name = record.get("name")
        return f"nodes[{i}] ({name[:80]})" if isinstance(name, str) else f"nodes[{i}]"

    def read_mesh(self, record: dict[str, Any], place: str) -> Mesh:
        shape, names = self.items(record, "shape", int, place), self.items(record, "names", str, place)
        devices = self.items(record, "devices", int, place) if "devices" in record else None
        if len(shape) != len(names) or len({*names}) != len(names) or min(shape, default=0) < 1:
            raise self.error(place, "a mesh has as many names as sizes, no name twice, and sizes > 0")
        if any(not name or "," in name for name in names):
            raise self.error(f"{place}.names", "the name of an axis is empty or has a comma")
        mesh = Mesh(tuple(shape), tuple(names), None if devices is None else tuple(devices))
        if mesh.world > 1 << 20:
            raise self.error(f"{place}.shape", "a mesh has at most 1048576 ranks")
        if devices is not None and (len(devices) != mesh.world or len({*devices}) != mesh.world or min(devices) < 0):
            raise self.error(f"{place}.devices", "these are not as many ranks as the mesh has places")
        return mesh

    def axes(self, group: str, place: str) -> str:
        """A group of mesh axes, or none."""
        for name in group.split(",") if group else ():
            if name not in self.mesh.names:
                raise self.error(place, f"{name[:40]!r} is no axis of the mesh {self.mesh}")
        return group

    def constant(self, value: Any, place: str) -> torch.Tensor:
        spec = self.tensor(self.typed(value, dict, place), place)
        return spec.empty("meta")

    def node(self, record: dict[str, Any], place: str) -> None:
        op = self.get(record, "op", str, place)
        if op == "output":
            if record is not self.data["nodes"][-1]:
                raise self.error(place, "the output stands before other nodes")
            node = self.graph.output(())
            node.args = (tuple(self.arguments(record, place)),)
            name = ""
        else:
            name = self.get(record, "name", str, place)
            if not name or name in self.nodes:
                raise self.error(
                    place, f"there are two nodes of the name {name[:80]!r}" if name else "its name is empty"
                )
            node = self.made(op, record, place)
            self.nodes[name] = node
        phase = self.choice(self.get(record, "phase", str, place), PHASES, f"{place}.phase")
        details = NodeInfo(phase, self.spec(record.get("value"), f"{place}.value"), name=name)
        details.module = self.get(record, "module", str, place, "")
        details.kept = self.get(record, "kept", bool, place, False)
        details.region = self.get(record, "region", int, place, None)
        details.rounded = self.get(record, "rounded", bool, place, False)
        details.once = self.get(record, "once", bool, place, False)
        details.source = self.get(record, "line", str, place, "")
        details.origin = self.get(record, "origin", str, place, "")
        details.share = self.get(record, "share", float, place, 1.0)
        if not 0 < details.share <= 1:
            raise self.error(f"{place}.share", f"{details.share!r} is not above 0 and at most 1")
        details.serves = tuple(self.items(record, "serves", str, place, []))
        varies = self.get(record, "varies", str, place, None)
        details.varies = None if varies is None else self.axes(varies, f"{place}.varies")
        collective = self.get(record, "collective", dict, place, None)
        details.collective = None if collective is None else self.collective(collective, f"{place}.collective")
        set_info(node, details)
        self.places.append((node, record, place))

    def made(self, op: str, record: dict[str, Any], place: str) -> fx.Node:
        if op == "input":
            node = self.graph.placeholder(f"input_{len(self.inputs)}")
            kind = self.choice(self.get(record, "source", str, place), _SOURCES, f"{place}.source")
            owner = self.get(record, "owner", int, place, -1)
            if (owner >= 0) != (kind in _OWNED):
                raise self.error(place, "an input of an update has its number as owner, another one none")
            self.inputs[node] = Source(kind, self.get(record, "of", str, place), owner)
            return node
        if op == "constant":
            name = self.get(record, "of", str, place)
            if name not in self.constants or not _CONSTANT.fullmatch(name):
                raise self.error(place, f"there is no constant {name[:80]!r}")
            return self.graph.create_node("get_attr", name)
        try:
            target = self.find(op)
        except LookupError as error:
            raise self.error(f"{place}.op", f"{op[:80]!r} cannot be called: {error}") from None
        args = self.arguments(record, place)
        kwargs = {
            key: self.value(value, f"{place}.kwargs.{key[:80]}")
            for key, value in self.get(record, "kwargs", dict, place, {}).items()
        }
        try:
            check_call(target, args, kwargs)
        except TypeError as error:
            raise self.error(place, f"{op} is called wrongly: {str(error)[:200]}") from None
        node = self.graph.call_function(target)
        node.args, node.kwargs = tuple(args), kwargs
        return node

    def arguments(self, record: dict[str, Any], place: str) -> list[Any]:
        args = self.get(record, "args", list, place)
        return [self.value(each, f"{place}.args[{i}]") for i, each in enumerate(args)]

    def collective(self, record: dict[str, Any], place: str) -> CollectiveInfo:
        identity, reduce_op = record.get("fusion_id"), record.get("reduce_op")
        group = self.get(record, "group", str, place)
        return CollectiveInfo(
            kind=self.get(record, "kind", str, place),
            group=self.axes(group, f"{place}.group") or group,
            dtype=self.dtype(self.get(record, "dtype", str, place), f"{place}.dtype"),
            nbytes=self.get(record, "bytes", int, place),
            members=tuple(self.items(record, "members", str, place)),
            sequence=self.get(record, "index", int, place),
            reduce_op=None if reduce_op is None else self.typed(reduce_op, str, f"{place}.reduce_op"),
            fusion_id=None if identity is None else self.typed(identity, int, f"{place}.fusion_id"),
            role=self.get(record, "role", str, place),
        )

    def link(self, node: fx.Node, record: dict[str, Any], place: str) -> None:
        """What a node's metadata says of other nodes, which may stand behind it."""
        details = info(node)
        if "next_step" in record:
            details.next_step = self.reference(record["next_step"], f"{place}.next_step")
        details.rest = tuple(
            self.stretch(dict(zip(("begin", "end"), pair, strict=False)), f"{place}.rest[{i}]")
            for i, pair in enumerate(self.items(record, "rest", list, place, []))
        )
        details.sends = tuple(self.pieces(record, "sends", "collective", place))
        details.writes = tuple(self.pieces(record, "writes", "node", place))
        details.parts = tuple(
            Part(
                tuple(self.items(part, "names", str, f"{place}.parts[{i}]")),
                self.named(part, "value", f"{place}.parts[{i}]"),
                self.named(part, "result", f"{place}.parts[{i}]"),
            )
            for i, part in enumerate(self.items(record, "parts", dict, place, []))
        )

    def pieces(self, record: dict[str, Any], key: str, of: str, place: str) -> list[tuple[fx.Node, Stretch]]:
        found = self.items(record, key, dict, place, [])
        places = [f"{place}.{key}[{i}]" for i in range(len(found))]
        return [
            (self.named(each, of, where), self.stretch(each, where)) for each, where in zip(found, places, strict=True)
        ]

    def named(self, record: dict[str, Any], key: str, place: str) -> fx.Node:
        return self.reference({"node": self.get(record, key, str, place)}, f"{place}.{key}")

    def stretch(self, record: dict[str, Any], place: str) -> Stretch:
        begin, end = self.get(record, "begin", int, place), self.get(record, "end", int, place)
        if not 0 <= begin <= end < LARGEST:
            raise self.error(place, "a stretch begins at 0 or later, and does not end before")
        return Stretch(begin, end)

    def sources(self, order: list[str]) -> dict[fx.Node, Source]:
        nodes = [self.reference({"node": name}, "program.inputs") for name in order]
        if len(dict.fromkeys(nodes)) != len(nodes) or dict.fromkeys(nodes).keys() != self.inputs.keys():
            raise self.error("program.inputs", "these are not the inputs of the graph, each once")
        return {node: self.inputs[node] for node in nodes}

    def updates(self, records: list[dict[str, Any]]) -> list[Update]:
        return [self.facts.update(record, f"program.updates[{i}]") for i, record in enumerate(records)]

    def names(self, record: dict[str, Any]) -> Names:
        numbers = self.get(record, "numbers", dict, "program.names")
        for base, number in numbers.items():
            self.typed(number, int, f"program.names.numbers.{base[:80]}")
        free = dict.fromkeys(self.items(record, "free", str, "program.names"))
        own = [name for name in self.nodes if name not in free]
        return Names.restored(numbers, [*own, *self.items(record, "taken", str, "program.names")])

    def rows(self, body: dict[str, Any], key: str, kinds: tuple[type[Any], ...]) -> list[list[Any]]:
        """A list of lists of as many values, of these types."""
        found: list[list[Any]] = self.items(body, key, list, "program")
        for i, row in enumerate(found):
            if len(row) != len(kinds):
                raise self.error(f"program.{key}[{i}]", f"these are not {len(kinds)} values")
            for value, kind in zip(row, kinds, strict=True):
                self.typed(value, kind, f"program.{key}[{i}]")
        return found
