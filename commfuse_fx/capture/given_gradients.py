"""Build the `Program` of an update whose gradients the caller has: no model is run, and nothing is differentiated.

Why: docs/decisions.md, "The update of a module is a graph of its own".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from commfuse_fx.capture.build import check_parameters, describe_parameters
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, set_info
from commfuse_fx.ir.core.program import OptimizerInfo, Program, Source

_PATH = "input.0."
"""What stands in front of a parameter's name in the path of its gradient, among the arguments of a call."""


def capture_update(
    model: nn.Module,
    leaves: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    config: CompileConfig,
    optimizer: OptimizerInfo | None,
) -> Program:
    """The program that gets gradients as inputs, and is to update their parameters. In place of a loss it has zero.

    model: whose parameters these are. leaves: the gradients, each with the path that it has in a dict, by the name of
    its parameter, which is the only argument of a call.

    Raises CaptureError for a parameter that cannot be traced.
    """
    check_parameters(model)
    params, names = describe_parameters(model), [path.removeprefix(_PATH) for path, _ in leaves]
    graph = fx.Graph()
    output = graph.output(())
    set_info(output, NodeInfo("update"))
    program = Program(graph, mesh, config, params, {}, True, output, optimizer=optimizer)
    build = Builder(program)
    with build.before(output):
        for name in names:
            _add_input(program, Source("parameter", name), params[name].spec)
        for name, (path, gradient) in zip(names, leaves, strict=True):
            program.grads[name] = _add_input(program, Source("input", path), TensorSpec.of(gradient))
        kwargs = {"dtype": torch.float32, "device": torch.device("cpu")}
        spec = TensorSpec((), torch.float32, (), "cpu")
        like = NodeInfo("forward")
        program.loss = build.call(aten.full.default, ([], 0.0), kwargs, spec=spec, like=like, name="loss")
    program.set_output()
    return program


def given_gradients(program: Program) -> list[str]:
    """The names of the parameters whose gradients a program of an update gets."""
    return [source.name.removeprefix(_PATH) for source in program.sources.values() if source.kind == "input"]


def _add_input(program: Program, source: Source, spec: TensorSpec) -> fx.Node:
    """A new input at the graph's insertion point."""
    node = program.graph.placeholder(f"{source.kind}_{len(program.sources)}")
    set_info(node, NodeInfo("input", spec, name=program.names.reserve(source.name)))
    program.add_source(node, source)
    return node
