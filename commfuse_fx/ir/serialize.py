"""The program as versioned JSON: plain data, nothing to execute."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.meta import CollectiveInfo, Spec, TensorSpec, dtype_name, info
from commfuse_fx.ir.naming import op_name
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import SCHEMA, header


def to_dict(program: Program) -> dict[str, Any]:
    """`{"schema", "header", "nodes"}`; references to nodes are written `{"node": name}`."""
    return {
        "schema": SCHEMA,
        "header": dict(header(program)),
        "nodes": [_node(program, node) for node in program.graph.nodes],
    }


def to_json(program: Program) -> str:
    return json.dumps(to_dict(program), indent=1)


def _node(program: Program, node: fx.Node) -> dict[str, Any]:
    details = info(node)
    if node.op == "output":
        return {"op": "output", "args": _value(node.args[0])}
    record: dict[str, Any] = {"name": details.name, "phase": details.phase, "value": _spec(details.spec)}
    if node.op == "placeholder":
        source = program.sources[node]
        record.update(op="input", source=source.kind)
        if source.kind == "flat":
            segment = next(s for s in program.updates[source.owner].segments if s.members[0][0] == source.name)
            record["members"] = [{"name": name, "offset": offset} for name, offset in segment.members]
        return record
    if node.op == "get_attr":
        return {**record, "op": "constant"}
    record.update(op=op_name(node.target), module=details.module, args=_value(node.args))
    if node.kwargs:
        record["kwargs"] = {key: _value(value) for key, value in node.kwargs.items()}
    if details.kept:
        record["kept"] = True
    if details.next_step is not None:
        record["next_step"] = {"node": info(details.next_step).name}
    if details.rest:
        record["rest"] = [[stretch.begin, stretch.end] for stretch in details.rest]
    if details.sends:
        record["sends"] = [
            {"collective": info(start).name, "begin": stretch.begin, "end": stretch.end}
            for start, stretch in details.sends
        ]
    if details.collective is not None:
        record["collective"] = _collective(details.collective, program.mesh.size(details.collective.group))
    return record


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
    }


def _spec(spec: Spec) -> Any:
    if isinstance(spec, TensorSpec):
        return {"dtype": dtype_name(spec.dtype), "shape": list(spec.shape), "stride": list(spec.stride)}
    return None if spec is None else [_spec(item) for item in spec]


def _value(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": info(value).name}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"text": str(value).removeprefix("torch.")}
