"""What keeps a step out of a CUDA graph, as far as its program shows.

A graph repeats kernels, and nothing else of a step. What Python or the CPU computes would stay what it was when the
graph was captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from commfuse_fx.ir.core.dependence import Roots, is_opaque, written_nodes
from commfuse_fx.ir.core.functions import optimizer_step
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.program import Program

aten = torch.ops.aten

_READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)
_WRITES_SELECTED = (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)


def obstacle(program: Program, on: str) -> str:
    """Why a training step cannot be captured, as a sentence without its full stop; "" if nothing forbids it.

    on: the type of the device that the graph would run on, "cuda" outside of tests.
    """
    if program.config.divides_graphs:
        return f'parallel_mode="{program.config.parallel_mode}" divides the graph among ranks'
    if any(param.shard or param.rows_alone for param in program.params.values()):
        return (
            "enable_parallel_optimizer=True keeps parts of parameters and states, which are looked at before each step"
        )
    if any(source.kind == "seed" for source in program.sources.values()):
        return "the step draws random numbers from a seed that is a number of each step"
    return next((found for node in program.graph.nodes if (found := _obstacle_at(node, on))), "") or _of_inputs(program)


def _obstacle_at(node: fx.Node, on: str) -> str:
    if info(node).once or node.op == "output" or (node.op == "get_attr" and all(info(u).once for u in node.users)):
        return ""
    name, where = info(node).name, f" ({info(node).source})" if info(node).source else ""
    if node.target is optimizer_step:
        return "the optimizer's own step() makes the update"
    if is_opaque(node):
        return f"{name}{where} calls a Python function, which a graph does not repeat"
    tags = getattr(node.target, "tags", ())
    is_read = any(tag in tags for tag in _READ_BY_HOST) and node.target is not aten.index.Tensor
    if is_read or _has_to_count(node):
        return f"the host waits for the result of {name}{where}"
    if torch.Tag.cudagraph_unsafe in tags:
        return f"{name}{where} calls {node.target}, whose author says that graphs do not repeat it"
    devices = dict.fromkeys(device for device in _devices(info(node).spec) if device.split(":")[0] != on)
    if devices and not goes_to_device(node, on):
        return f"{name}{where} is on {next(iter(devices))}, not on {on}"
    return ""


def _has_to_count(node: fx.Node) -> bool:
    """Whether a node selects by a mask, of which the host has to count what it selects. The count of indices is known.
    PyTorch writes a number of the CPU without counting."""
    if node.target not in (aten.index.Tensor, *_WRITES_SELECTED):
        return False
    indices: Any = node.args[1]
    if node.target in _WRITES_SELECTED and getattr(info(cast(fx.Node, node.args[2])).spec, "device", None) == "cpu":
        return False
    return any(getattr(info(each).spec, "dtype", None) in _MASKS for each in indices if each is not None)


def goes_to_device(node: fx.Node, on: str) -> bool:
    """Whether a node is an input of the step that the model moves to such a device, and uses in no other way.

    A captured step gets the moved tensor in its place.
    """
    moves = [user.target is aten._to_copy.default and _moved_to(user) == on for user in node.users]
    return node.op == "placeholder" and bool(moves) and all(moves)


def is_moved_without_waiting(node: fx.Node) -> bool:
    """Whether the model moves an input with `non_blocking=True` wherever it does. Else who has called the step may
    overwrite memory of the host that he has passed."""
    moves = [user for user in node.users if user.target is aten._to_copy.default]
    return bool(moves) and all(user.kwargs.get("non_blocking") for user in moves)


def _moved_to(node: fx.Node) -> str:
    device: Any = node.kwargs.get("device")
    return "" if device is None else torch.device(device).type


def _of_inputs(program: Program) -> str:
    roots = Roots(program.graph, program.aliases())
    written = dict.fromkeys(roots[value] for node in program.graph.nodes for value in written_nodes(node))
    devices: dict[str, None] = {}
    for node, source in program.sources.items():
        spec = info(node).spec
        devices.update(dict.fromkeys(device for device in _devices(spec) if device != "cpu"))
        if source.kind != "input" or not isinstance(spec, TensorSpec):
            continue
        if node in written:
            return f"the model writes to its input {source.name}"
        if any(step == 0 and size > 1 for step, size in zip(spec.stride, spec.shape, strict=True)):
            return f"elements of the input {source.name} share memory"
    return f"the step is on several devices, {', '.join(devices)}" if len(devices) > 1 else ""


def _devices(spec: Spec) -> Iterator[str]:
    """Where the tensors of a value are. Attention records "meta" for its random state, which follows the capture."""
    if isinstance(spec, TensorSpec):
        if spec.device != "meta":
            yield spec.device
    elif isinstance(spec, tuple):
        for part in spec:
            yield from _devices(part)
