"""The program as versioned JSON: plain data, nothing to execute. `ir.json.read` reads it back.

All that passes, simulation and explanation need is written, but no values: of a constant only its spec, of the source
line of a node the name of the file without its folder, and of the session neither rank nor process groups. The text is
the same over runs and ranks.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import PurePath
from typing import Any

from torch import fx

from commfuse_fx.config.plain_data import config_to_dict
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, Stretch, TensorSpec, dtype_name, info
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.ir.core.program import OptimizerInfo, Parameter, Program, Update
from commfuse_fx.ir.ops.values import write_spec, write_value
from commfuse_fx.ir.text.write_text import header
from commfuse_fx.support.json_fields import dump_text

SCHEMA = 1
"""The schema that this version writes, and the newest that it reads. It is not that of the canonical text."""


def to_dict(program: Program) -> dict[str, Any]:
    """`{"schema", "header", "nodes", "program"}`; references to nodes are written `{"node": name}`."""
    return {
        "schema": SCHEMA,
        "header": dict(header(program)),
        "nodes": [_node(program, node) for node in program.graph.nodes],
        "program": _program(program),
    }


def to_json(program: Program) -> str:
    """The program as JSON, a line for each node."""
    return dump_text(to_dict(program))


def _node(program: Program, node: fx.Node) -> dict[str, Any]:
    details = info(node)
    if node.op == "output":
        return {"op": "output", "args": _values(node.args[0]), "phase": details.phase, **_notes_on(node, details)}
    record: dict[str, Any] = {"name": details.name, "phase": details.phase, "value": write_spec(details.spec)}
    if node.op == "placeholder":
        source = program.sources[node]
        record.update(op="input", source=source.kind, of=source.name)
        if source.owner >= 0:
            record["owner"] = source.owner
        if source.kind == "flat":
            segment = next(s for s in program.updates[source.owner].segments if s.members[0][0] == source.name)
            record["members"] = [{"name": name, "offset": offset} for name, offset in segment.members]
        return {**record, **_notes_on(node, details)}
    if node.op == "get_attr":
        return {**record, "op": "constant", "of": str(node.target), **_notes_on(node, details)}
    record.update(op=op_name(node.target), module=details.module, args=_values(node.args))
    if node.kwargs:
        record["kwargs"] = {key: write_value(value) for key, value in node.kwargs.items()}
    if details.collective is not None:
        record["collective"] = _collective(details.collective, program.mesh.size(details.collective.group))
    return {**record, **_notes_on(node, details)}


def _values(values: Any) -> list[Any]:
    return [write_value(value) for value in values]


def _notes_on(node: fx.Node, details: NodeInfo) -> dict[str, Any]:
    """The rest of a node's metadata, as far as there is any. As in a copy, what has left the graph is left out."""
    found: dict[str, Any] = {}
    if details.kept:
        found["kept"] = True
    if details.region is not None:
        found["region"] = details.region
    if details.rounded:
        found["rounded"] = True
    if details.once:
        found["once"] = True
    if details.next_step is not None:
        found["next_step"] = write_value(details.next_step)
    if details.rest:
        found["rest"] = [[stretch.begin, stretch.end] for stretch in details.rest]
    if details.sends:
        found["sends"] = [{"collective": info(start).name, **_stretch(stretch)} for start, stretch in details.sends]
    if details.source:
        found["line"] = PurePath(details.source).name
    if details.origin:
        found["origin"] = details.origin
    if details.share != 1.0:
        found["share"] = details.share
    if details.serves:
        found["serves"] = list(details.serves)
    if details.varies is not None:
        found["varies"] = details.varies
    parts = [part for part in details.parts if _in(node.graph, part.value) and _in(node.graph, part.result)]
    if parts:
        found["parts"] = [
            {"names": list(part.names), "value": info(part.value).name, "result": info(part.result).name}
            for part in parts
        ]
    writes = [(write, stretch) for write, stretch in details.writes if _in(node.graph, write)]
    if writes:
        found["writes"] = [{"node": info(write).name, **_stretch(stretch)} for write, stretch in writes]
    return found


def _in(graph: fx.Graph, node: fx.Node) -> bool:
    return node.graph is graph and not node._erased


def _stretch(stretch: Stretch) -> dict[str, int]:
    return {"begin": stretch.begin, "end": stretch.end}


def _collective(details: CollectiveInfo, size: int) -> dict[str, Any]:
    return {
        "kind": details.kind,
        "reduce_op": details.reduce_op,
        "dtype": dtype_name(details.dtype),
        "group": details.group,
        "group_size": size,
        "bytes": details.nbytes,
        "members": list(details.members),
        "fusion_id": details.fusion_id,
        "index": details.sequence,
        "role": details.role,
    }


def _program(program: Program) -> dict[str, Any]:
    names = [info(node).name for node in program.graph.nodes if node.op != "output"]
    numbers, taken = program.names.state()
    own, reserved = dict.fromkeys(names), dict.fromkeys(taken)
    results = program.module_results
    return {
        "mesh": _mesh(program.mesh),
        "config": config_to_dict(program.config),
        "training": program.training,
        "batch_axes": program.batch_axes,
        **({"by_autograd": program.by_autograd} if program.by_autograd else {}),
        **({"batch_inputs": list(program.batch_inputs)} if program.batch_inputs else {}),
        **({"own_buffers": list(program.own_buffers)} if program.own_buffers else {}),
        "parameters": [_parameter(param) for param in program.params.values()],
        "inputs": [info(node).name for node in program.sources],
        "constants": {name: _plain(TensorSpec.of(value)) for name, value in program.constants.items()},
        "loss": write_value(program.loss),
        "gradients": {name: write_value(node) for name, node in program.grads.items()},
        **({"aux": {name: write_value(node) for name, node in program.aux.items()}} if program.aux else {}),
        "optimizer": None if program.optimizer is None else _optimizer(program.optimizer),
        "updates": [_update(update) for update in program.updates],
        "notes": [[note.topic, note.subject, note.reason] for note in program.notes],
        "redistributions": [
            [each.name, each.group, each.have, each.wanted, each.nbytes, each.cause] for each in program.redistributions
        ],
        **({"module_results": [list(astuple(each)) for each in results]} if results else {}),
        "names": {
            "numbers": dict(sorted(numbers.items())),
            "taken": sorted(name for name in taken if name not in own),
            "free": sorted(name for name in names if name not in reserved),
        },
    }


def _mesh(mesh: Mesh) -> dict[str, Any]:
    devices = {} if mesh.devices is None else {"devices": list(mesh.devices)}
    return {"shape": list(mesh.shape), "names": list(mesh.names), **devices}


def _plain(spec: TensorSpec) -> Any:
    """The device is that of the node which yields the constant."""
    return write_spec(TensorSpec(spec.shape, spec.dtype, spec.stride))


def _parameter(param: Parameter) -> dict[str, Any]:
    return {
        "name": param.name,
        "spec": write_spec(param.spec),
        "trainable": param.trainable,
        "sequence": param.sequence,
        "fusion_id": param.fusion_id,
        "layerwise_parallel": param.layerwise_parallel,
        "movable": param.movable,
        "is_block": param.is_block,
        **({"shares": list(param.shares)} if param.shares else {}),
        "layout": [[group, str(placement)] for group, placement in param.layout],
        "whole": write_spec(param.whole),
        **({} if param.parallel_optimizer else {"parallel_optimizer": False}),
        **({"shard": param.shard} if param.shard else {}),
        **({"rows_alone": True} if param.rows_alone else {}),
        **({} if param.owner is None else {"owner": param.owner}),
    }


def _optimizer(optimizer: OptimizerInfo) -> dict[str, Any]:
    return {
        "rule": optimizer.rule,
        "class_name": optimizer.class_name,
        "why_opaque": optimizer.why_opaque,
        "groups": [
            {"params": list(group.params), "flags": {name: write_value(flag) for name, flag in group.flags}}
            for group in optimizer.groups
        ],
    }


def _update(update: Update) -> dict[str, Any]:
    return {
        "rule": update.rule,
        "group": update.group,
        "segments": [
            {"numel": segment.numel, "members": [[name, offset] for name, offset in segment.members]}
            for segment in update.segments
        ],
    }
