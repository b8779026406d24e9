"""Trace a model with its marks, for tests."""

from __future__ import annotations

from commfuse_fx.capture.trace.trace import trace_step
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.meta import NodeInfo, spec_of
from commfuse_fx.ir.core.meta import set_info as put
from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.layout_op import is_mark, mark_of
from commfuse_fx.sharding.marking.marks import collect


def traced(model, mesh, *inputs, training=True):
    """The program of one step of `model(*inputs)`, whose first tensor's sum is the loss."""

    def loss_of(module, tensors, recorder):
        out = module(*tensors)
        out = out.logits if hasattr(out, "logits") else out
        return [(out[0] if isinstance(out, tuple) else out).sum()]

    found = trace_step(model, loss_of, list(inputs), mesh, training, marked=True)
    for node in found.graph.nodes:
        put(node, NodeInfo("forward", spec_of(node.meta.get("val")), name=node.name))
    program = Program(found.graph, mesh, CompileConfig.resolve({}), {}, {}, training, found.results[0])
    names = [Source("parameter", name) for name, _ in model.named_parameters()]
    names += [Source("buffer", name) for name, _ in model.named_buffers()]
    names += [Source("input", str(i)) for i in range(len(inputs))]
    for node, source in zip(found.placeholders, names, strict=True):
        program.add_source(node, source)
    return program


def resolved(model, mesh, *inputs):
    return resolve_marks(collect(model), traced(model, mesh, *inputs))


def parameter_layouts(found):
    return {name: str(pin.layout) for name, pin in found.parameters.items()}


def activation_layouts(found, gradient=False):
    """Subject and position of each mark on an activation -> its layout."""
    marks = ((mark_of(node), layout) for node, layout in found.activations.items())
    return {f"{mark.subject} {mark.position}": str(layout) for mark, layout in marks if mark.gradient == gradient}


def mark_nodes(program):
    return [node for node in program.graph.nodes if is_mark(node)]
