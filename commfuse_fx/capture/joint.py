"""Build the `Program` of a model whose backward the caller starts: forward and backward in one graph, with the place
between them at which the outputs are handed over and their gradients come in.

Why: docs/decisions.md, "Where the caller starts the backward, both halves are one graph".
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from commfuse_fx.capture.build import check_parameters, describe, write_back
from commfuse_fx.capture.guards.reads import Reads
from commfuse_fx.capture.guards.tree import Structure, flatten_output, unflatten
from commfuse_fx.capture.outputs.depending_outputs import computed_from
from commfuse_fx.capture.outputs.gradients_as_model import why_by_autograd
from commfuse_fx.capture.trace.function_gradients import FunctionCall
from commfuse_fx.capture.trace.provenance import OriginRecorder
from commfuse_fx.capture.trace.trace import Traced, aten, trace_step
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.functions import hand_over
from commfuse_fx.ir.core.halves import crossing, gradient_specs
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import NodeInfo, info, set_info, tensor_spec
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.ir.core.reshaped import dense_like


@dataclass(frozen=True)
class Outputs:
    """What a model returns, or what a step returns besides its loss.

    nest: how its tensors nest.
    differentiable: whether each of them has a gradient.
    read_late: parameters, buffers and inputs whose memory the backward reads. outputs_read_late: the numbers of such
        outputs. Nobody may change them in between.
    functions: what has to be known of functions if some outputs have no gradient.
    computed_from: for each output the numbers of the others that are computed from it.
    """

    nest: Structure
    differentiable: tuple[bool, ...] = ()
    read_late: tuple[Source, ...] = ()
    outputs_read_late: tuple[int, ...] = ()
    functions: tuple[FunctionCall, ...] = ()
    computed_from: tuple[tuple[int, ...], ...] = ()


def capture_joint(
    model: nn.Module,
    structure: Structure,
    leaves: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    config: CompileConfig,
    reads: Reads | None = None,
    training: bool = True,
) -> tuple[Program, Outputs]:
    """Trace one call of the model, and the backward from its outputs. Says of the outputs what the caller is given.

    leaves, structure: the call's tensors with their paths, and how they nest.
    training: whether there is a backward; else the call runs with gradients disabled.
    reads: takes notes of the Python values that the trace reads.

    Raises CaptureError when the call cannot be one graph; errors of the model itself pass unchanged.
    """
    check_parameters(model)
    found: list[tuple[list[str], Structure, tuple[tuple[int, ...], ...]]] = []

    def outputs_of(model: nn.Module, tensors: Sequence[torch.Tensor], recorder: OriginRecorder) -> list[torch.Tensor]:
        call = unflatten(structure, iter(tensors))["input"]
        outputs, nest = flatten_output(model(*call["args"], **call["kwargs"]), "output")
        found.append(([path for path, _ in outputs], nest, computed_from([tensor for _, tensor in outputs])))
        return [tensor for _, tensor in outputs]

    traced = trace_step(model, outputs_of, [tensor for _, tensor in leaves], mesh, training, reads=reads, seeded=True)
    [(paths, nest, depending)] = found
    has_backward = any(seed is not None for seed in traced.seeds)
    program = describe(traced, model, leaves, mesh, config, has_backward, None)
    program.by_autograd = why_by_autograd(model)
    if program.by_autograd:
        program.note(
            "by autograd",
            "all ops",
            f"autograd runs them, as {program.by_autograd}: the graph holds communication only, and so do predictions",
        )
    _hand_over(program, traced, paths)
    program.aux = {
        f"{path}.grad": grad for (path, _), grad in zip(leaves, traced.input_grads, strict=True) if grad is not None
    }
    program.set_output()
    roots = Roots(program.graph, program.aliases())
    read = dict.fromkeys(roots[node] for node in crossing(program))
    for node in traced.early:  # the backward reads what they hold when it runs
        read.pop(node, None)
    return program, Outputs(
        nest,
        tuple(seed is not None for seed in traced.seeds),
        tuple(source for node, source in program.sources.items() if node in read),
        tuple(i for i, node in enumerate(traced.results) if roots[node] in read),
        traced.functions.calls(program.graph, traced.calls, lambda node: info(node).name),
        depending,
    )


def _hand_over(program: Program, traced: Traced, paths: Sequence[str]) -> None:
    """Put everything of the forward before the place where outputs leave, and the rest behind it."""
    graph = program.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    seeds = dict.fromkeys(seed for seed in traced.seeds if seed is not None)
    late = dict.fromkeys(node for node in nodes if node.op == "call_function" and info(node).phase == "backward")
    early = [node for node in nodes if node not in late and node not in seeds]
    with graph.inserting_before(program.output):
        _keep_old_values(program, traced, late)
        write_back(program, _written_early(traced), before=program.output)
        traced_nodes = dict.fromkeys(nodes)
        early += [node for node in graph.nodes if node.op == "call_function" and node not in traced_nodes]
        leave = graph.call_function(hand_over, (list(traced.results),))
        set_info(leave, NodeInfo("forward", gradient_specs(traced.results), name=program.names.reserve("outputs")))
        gradients = [
            _gradient(program, leave, place, path, seed)
            for place, (path, seed) in enumerate(zip(paths, traced.seeds, strict=True))
            if seed is not None
        ]
    for seed in seeds:
        program.names.release(info(seed).name)
        graph.erase_node(seed)
    program.loss = leave
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    reorder(graph, [*inputs, *early, leave, *gradients, *late, program.output])
    _write_late(program, traced, late)


def _written_early(traced: Traced) -> list[tuple[fx.Node, fx.Node]]:
    """What the forward writes, and with which values."""
    pairs = [(target, traced.early.get(target, value)) for target, value in traced.mutations]
    return [(target, value) for target, value in pairs if value is not target]


def _write_late(program: Program, traced: Traced, late: dict[fx.Node, None]) -> None:
    """Let the backward write what it changes. It begins with what such a tensor holds then: other forwards and
    backwards may have come in between."""
    for target, value in traced.early.items():
        for user in [user for user in value.users if user in late]:
            user.replace_input_with(value, target)
    write_back(program, [pair for pair in traced.mutations if pair[0] in traced.early], before=program.output)


def _gradient(program: Program, leave: fx.Node, place: int, path: str, seed: fx.Node) -> fx.Node:
    """The gradient of one output, in place of what stood for it in the trace."""
    spec = info(leave).spec
    assert isinstance(spec, tuple)
    node = program.graph.call_function(operator.getitem, (leave, place))
    set_info(node, NodeInfo("backward", spec[place], name=program.names.reserve(f"{path}.grad")))
    assert tensor_spec(seed) == spec[place], "a seed lies as the gradient is handed in"
    seed.replace_all_uses_with(node)
    return node


def _keep_old_values(program: Program, traced: Traced, late: dict[fx.Node, None]) -> None:
    """What the backward reads of a buffer is copied before the forward changes it, or rank 0's values arrive."""
    written = dict.fromkeys(target for target, _ in traced.mutations)
    if program.config.broadcast_buffers:
        written |= {node: None for node, source in program.sources.items() if source.kind == "buffer"}
    roots = Roots(program.graph, program.aliases())
    read = dict.fromkeys(value for node in late for value in node.all_input_nodes if value not in late)
    for value in read:
        if roots[value] not in written or traced.early.get(value) is value:
            continue
        kept = program.graph.call_function(aten.clone.default, (value,))
        spec = dense_like(tensor_spec(value))
        set_info(kept, NodeInfo("forward", spec, name=program.names.reserve(f"{info(value).name}/before")))
        for user in [user for user in value.users if user in late]:
            user.replace_input_with(value, kept)
