"""Build the `Program` of one training step: trace the step, and describe its inputs and outputs.

Why: docs/decisions.md, "One call is the whole step".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from commfuse_fx.capture.guards.reads import Reads
from commfuse_fx.capture.guards.tree import Structure, flatten_output, unflatten
from commfuse_fx.capture.loss import LossFn, compute_loss
from commfuse_fx.capture.refusals.rank_writes import warn_of_rank_writes
from commfuse_fx.capture.trace.canonical_trace import canonicalize
from commfuse_fx.capture.trace.meta_tensors import device_of
from commfuse_fx.capture.trace.provenance import Origin, OriginRecorder, origin_of
from commfuse_fx.capture.trace.trace import Traced, aten, trace_step
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.fusion_marks import (
    is_of_each_rank,
    read_fusion_id,
    read_layerwise_parallel,
    read_parallel_optimizer,
)
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import NodeInfo, Spec, TensorSpec, info, set_info, spec_of
from commfuse_fx.ir.core.program import OptimizerInfo, Parameter, Program, Source
from commfuse_fx.ir.ops.shared_memory import is_part_of_storage, overlaps
from commfuse_fx.sharding.marking.traced_marks import module_marks_traced
from commfuse_fx.sharding.marking.traced_parts import BatchParts
from commfuse_fx.support.logs import logger
from commfuse_fx.support.long_lists import shortened

log = logger("trace")


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    structure: Structure,
    leaves: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    config: CompileConfig,
    training: bool,
    optimizer: OptimizerInfo | None,
    reads: Reads | None = None,
    batch: BatchParts | None = None,
) -> Program:
    """Trace one call of a step, and return its program.

    structure: how the call's arguments nest. leaves: their tensors, each with its path.
    training: whether the step has a backward.
    reads: notes the Python values that the trace reads.
    batch: what marked calls with `cross_batch` divide among ranks.

    Raises CaptureError if the step cannot become one graph. Errors of the model itself pass unchanged.
    """
    check_parameters(model)
    found: list[tuple[list[str], Structure]] = []

    def loss_of(model: nn.Module, tensors: Sequence[torch.Tensor], recorder: OriginRecorder) -> list[torch.Tensor]:
        call = unflatten(structure, iter(tensors))
        with module_marks_traced(loss_fn, "loss_fn"):
            loss, aux = compute_loss(model, call, loss_fn, recorder, config.has_aux)
        others, nest = flatten_output(aux, "aux")
        found.append(([path for path, _ in others], nest))
        return [loss, *(tensor.detach() for _, tensor in others)]

    inputs = [tensor for _, tensor in leaves]
    marked = config.divides_graphs
    traced = trace_step(model, loss_of, inputs, mesh, training, marked=marked, reads=reads, batch=batch)
    [(paths, nest)] = found
    program = describe(traced, model, leaves, mesh, config, training, optimizer)
    program.aux = dict(zip(paths, traced.results[1:], strict=True))
    program.aux_nest = nest
    write_back(program, traced.mutations, before=program.output)
    program.set_output()
    warn_of_rank_writes(program, traced.mutations)
    return program


def describe(
    traced: Traced,
    model: nn.Module,
    leaves: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    config: CompileConfig,
    training: bool,
    optimizer: OptimizerInfo | None,
) -> Program:
    """Make a program of a trace: name the nodes in canonical order, and describe inputs and gradients.

    The graph's output is still that of the trace, and no mutation is written back yet.
    """
    params = describe_parameters(model, [tensor for _, tensor in leaves])
    sources = canonicalize(
        traced,
        [
            *(Source("parameter", name) for name in params),
            *(Source("buffer", name) for name, _ in model.named_buffers()),
            *(Source("input", path) for path, _ in leaves),
        ],
        model,
    )
    program = Program(
        graph=traced.graph,
        mesh=mesh,
        config=config,
        params=params,
        sources={},
        training=training,
        loss=next(iter(traced.results), traced.placeholders[0]),  # a module may return no tensor
        constants=traced.constants,
        optimizer=optimizer if training else None,
        own_buffers=tuple(name for name, each in model.named_buffers() if is_of_each_rank(each, config.parallel_mode)),
    )
    for node, source in zip(traced.placeholders, sources, strict=True):
        program.add_source(node, source)
    _annotate(program)
    _set_gradients(program, traced)
    _warn_of_idle_marks(program, model)
    return program


def _warn_of_idle_marks(program: Program, model: nn.Module) -> None:
    """Warn of parameters and buffers that are marked as each rank's own where ranks share all of them."""
    mode = program.config.parallel_mode
    if program.mesh.world == 1 or mode in ("stand_alone", "hybrid_parallel"):
        return
    held = (*model.named_parameters(), *model.named_buffers())
    marked = [name for name, each in held if read_layerwise_parallel(each, name)]
    why = f'it has no effect with parallel_mode="{mode}", where ranks share all parameters and buffers'
    for name in marked:
        program.note("layerwise_parallel", name, why)
    if marked:
        log.warning(
            'layerwise_parallel of %s: %s; pass parallel_mode="hybrid_parallel", or remove the mark',
            ", ".join(shortened(marked, 4, "{} others")),
            why,
        )


def describe_parameters(model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> dict[str, Parameter]:
    """The model's parameters in the order of named_parameters(), with their marks.

    inputs: those of the call that is described, which say where parameters on the meta device are to be.
    """
    params: dict[str, Parameter] = {}
    shared = overlaps(dict([*model.named_parameters(), *model.named_buffers()]))
    sequence, device = 0, str(device_of(model, inputs))
    for name, param in model.named_parameters():
        spec = TensorSpec.of(param)
        spec = replace(spec, device=device) if param.is_meta else spec
        is_block = spec.is_dense and name not in shared
        params[name] = Parameter(
            name,
            spec,
            param.requires_grad,
            sequence if param.requires_grad else -1,
            read_fusion_id(param, name),
            read_layerwise_parallel(param, name),
            is_block and not is_part_of_storage(param),
            is_block,
            shared.get(name, ()),
            parallel_optimizer=read_parallel_optimizer(param, name),
        )
        sequence += param.requires_grad
    return params


def check_kinds(model: nn.Module) -> None:
    """Raises CaptureError for a parameter or buffer whose class does not even let its data be looked at."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (nn.Parameter, torch.Tensor) or isinstance(
            tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
        ):
            continue
        try:
            with torch._C.DisableTorchFunctionSubclass():
                _ = tensor.data
        except Exception as error:
            raise CaptureError(
                f"{name} is a {type(tensor).__name__}: only plain tensors can be compiled (put what this rank holds of "
                "it in its place, or divide the model with cf.shard)"
            ) from error


def check_parameters(model: nn.Module) -> None:
    """Raises CaptureError for a parameter that cannot be traced, such as a tensor subclass."""
    check_kinds(model)
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise CaptureError(f"parameter {name} is not initialised yet: run the model once on a batch first")
        if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
            raise CaptureError(
                f"parameter {name} is a {type(param.data).__name__}: only plain tensors can be compiled "
                "(unwrap DTensor and other tensor subclasses first)"
            )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise CaptureError(f"buffer {name} is not initialised yet: run the model once on a batch first")


def _annotate(program: Program) -> None:
    origins: dict[fx.Node, Origin] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = program.sources[node].name
            set_info(node, NodeInfo("input", spec_of(node.meta["val"]), name=program.names.reserve(name)))
        elif node.op == "get_attr":
            constant = program.constants[str(node.target)]
            set_info(node, NodeInfo("input", spec_of(constant), name=program.names.numbered("constant")))
        elif node.op == "call_function":
            origin = origins[node] = _inherited(node, origins)
            details = NodeInfo(origin.phase, _spec_of_result(node), origin.module, source=origin.source)
            set_info(node, details)
            details.name = program.names.of_traced(node)
        else:
            set_info(node, NodeInfo("update"))
        if getattr(node.target, "namespace", "") == "aten" and _makes_sparse(node):
            raise CaptureError(
                f"{info(node).name} {origins[node].place} makes a sparse gradient, which cannot be reduced in a "
                "bucket: use sparse=False"
            )


def _spec_of_result(node: fx.Node) -> Spec:
    """What the op returns. PyTorch 2.11 records a tensor that was written into a copy of an expanded one as expanded,
    though no memory of such strides could hold it."""
    value = node.meta.get("val")
    returns: list[Any] = list(getattr(getattr(node.target, "_schema", None), "returns", ()))
    if isinstance(value, torch.Tensor) and len(returns) == 1 and returns[0].alias_info is None:
        if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
            return spec_of(torch.empty_like(value))
    return spec_of(value)


def _inherited(node: fx.Node, origins: Mapping[fx.Node, Origin]) -> Origin:
    """The origin of a node. Autograd's own ops, such as accumulations, get the module and line of an input.

    origins: those of the nodes above.
    """
    own = origin_of(node)
    if own.known or own.phase != "backward":
        return own
    above = (origins[value] for value in node.all_input_nodes if value in origins)
    near = next((origin for origin in above if origin.known), None)
    return own if near is None else replace(near, phase="backward")


def _makes_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def _set_gradients(program: Program, traced: Traced) -> None:
    """Set the program's gradients, and note the parameters that have none."""
    program.grads = {
        name: grad
        for name, grad in zip(program.params, traced.grads, strict=True)
        if grad is not None and program.params[name].trainable
    }
    for name, param in program.params.items():
        if program.training and param.trainable and name not in program.grads:
            program.note("unused", name, "the result does not depend on it, so it has no gradient and no update")


def write_back(program: Program, mutations: Sequence[tuple[fx.Node, fx.Node]], before: fx.Node) -> None:
    """Write new values into the inputs that the trace has changed, by copies in front of the node `before`."""
    for target, value in mutations:
        details = info(value)
        with program.graph.inserting_before(before):
            node = program.graph.call_function(aten.copy_.default, (target, value))
        set_info(node, details.derive(info(target).spec, phase="update"))
        info(node).name = program.names.reserve(f"update/{info(target).name}")
