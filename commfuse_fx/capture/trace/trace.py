"""Trace forward, loss and backward of a training step into one functional graph of aten ops.

Tracing has two stages. The first records what eager execution does: the forward and `.backward()`, so that autograd's
own rules apply. The second makes the result functional: in-place ops become plain ones, and changes of inputs such as
BatchNorm statistics become values that are copied back at the end of the step.

Why: docs/decisions.md, "The backward is traced without autocast".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from commfuse_fx import ops
from commfuse_fx.capture.guards.reads import Reads
from commfuse_fx.capture.guards.tensor_attributes import own_attributes
from commfuse_fx.capture.refusals.anomaly import without_anomaly_detection
from commfuse_fx.capture.refusals.eager_collectives import eager_collectives_refused
from commfuse_fx.capture.refusals.kept_tensors import refuse_kept_tensors
from commfuse_fx.capture.refusals.other_leaves import other_gradients_kept
from commfuse_fx.capture.refusals.own_mode import own_mode_kept
from commfuse_fx.capture.refusals.saved_tensors import outer_hooks_masked
from commfuse_fx.capture.refusals.storage_offsets import storage_offsets_refused
from commfuse_fx.capture.torch_parts.batch_norm import BATCH_NORMS
from commfuse_fx.capture.torch_parts.emulate import traceable_torch
from commfuse_fx.capture.torch_parts.functional_collectives import functional_collectives
from commfuse_fx.capture.torch_parts.replaced_tensors import ReplacedTensors
from commfuse_fx.capture.torch_parts.substitute import Attributes, substituted
from commfuse_fx.capture.torch_parts.sync_batch_norm import sync_batch_norm
from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.capture.trace.call_paths import CallPaths
from commfuse_fx.capture.trace.changes_in_place import refuse_changes, refuse_turned
from commfuse_fx.capture.trace.copied_gradients import drop_copies_of_gradients
from commfuse_fx.capture.trace.empty_tensors import FakeTensors
from commfuse_fx.capture.trace.function_gradients import FunctionGradients, functions_noted, is_gradient
from commfuse_fx.capture.trace.functional_trace import make_functional
from commfuse_fx.capture.trace.late_writes import return_early_values, take_early_values
from commfuse_fx.capture.trace.meta_tensors import OTHER_META, device_of, is_of_meta, traced_tensor
from commfuse_fx.capture.trace.provenance import OriginRecorder, innermost_function, origin_of
from commfuse_fx.capture.trace.quick_recording import quick_recording
from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.dependence import Roots, written_nodes
from commfuse_fx.ir.core.edit import ALIASES
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.kernels.cudnn_recurrent import CUDNN
from commfuse_fx.kernels.recurrent import WITH_WORKSPACE, WITHOUT_WORKSPACE
from commfuse_fx.sharding.marking.traced_marks import marks_traced
from commfuse_fx.sharding.marking.traced_parts import BatchParts
from commfuse_fx.sharding.rules.writing.decompose import decompose, decomposed
from commfuse_fx.support.user_lines import user_line_of

aten = torch.ops.aten

ResultsOf = Callable[[nn.Module, Sequence[torch.Tensor], OriginRecorder], Sequence[torch.Tensor]]
"""(model, inputs, recorder) -> tensors: the loss of a step, or the outputs of a model."""

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)


_COMPILED = "symbolically trace a dynamo-optimized function"
_CALLS_COMPILED = (
    "a function or module compiled with torch.compile is called there, which cannot be traced: call the original, "
    "which is what was passed to torch.compile (for a module its _orig_mod)"
)
# Part of autograd's message where a tensor that was turned in place has a gradient of another shape.
_OF_TURNED = "returned an invalid gradient"
_CHANGED_SAVED = "needed for gradient computation has been modified by an inplace operation"
# Parts of torch's messages for code that reads the values of a traced tensor without an op.
_NO_DATA = ("Cannot access data pointer", "data is not allocated yet", ".numpy() is not supported")


@dataclass
class Traced:
    """The result of a trace.

    placeholders: the parameters, buffers and inputs, in this order.
    results: the loss, or the model's outputs.
    seeds: for each result the node of its gradient, if the backward of the trace began with one; else None.
    grads: the gradients of the parameters; None for a parameter that takes no part.
    input_grads: the gradients of the inputs of a seeded trace; None for an input that requires none.
    mutations: pairs of an input and its new value.
    early: for each input that the backward of a seeded trace writes, its value where that backward begins.
    functions: of a seeded trace, the functions whose gradients follow from different results.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    placeholders: list[fx.Node]
    results: list[fx.Node]
    seeds: list[fx.Node | None]
    grads: list[fx.Node | None]
    input_grads: list[fx.Node | None]
    mutations: list[tuple[fx.Node, fx.Node]]
    early: dict[fx.Node, fx.Node]
    calls: CallPaths
    functions: FunctionGradients


def trace_step(
    model: nn.Module,
    results_of: ResultsOf,
    inputs: Sequence[torch.Tensor],
    mesh: Mesh,
    training: bool,
    marked: bool = False,
    reads: Reads | None = None,
    seeded: bool = False,
    batch: BatchParts | None = None,
) -> Traced:
    """Trace one step into a functional graph.

    results_of: called as results_of(model, inputs, recorder). It runs the model on traced inputs and returns its loss.
    inputs: the call's tensors.
    training: whether the step has a backward.
    seeded: whether `results_of` returns any number of outputs instead of a loss. The backward then begins with a
        gradient for each output that requires one; if none does, there is no backward.
    marked: whether marks of `cf.shard` on activations become nodes of the graph. Ops that divide by a count of the
        whole batch then become sums and divisions.
    reads: notes the Python values that the trace reads.
    batch: what marked calls with `cross_batch` divide among ranks.

    Raises CaptureError, with module, source line and fix, if Python control flow depends on the values of tensors or
    if the loss cannot be differentiated. Errors of the model itself pass unchanged.
    """
    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    count = 0  # of results
    recorder = OriginRecorder(model)
    functions = FunctionGradients(recorder.source_of)
    recorder.random.generators.is_divided = marked
    if reads is not None:
        reads.on_generator, reads.on_python_generator = recorder.random.generators.watch, recorder.numbers.watch

    def step(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        nonlocal count
        values = iter(flat)
        fresh = [_stand_in(param, next(values), training, seeded) for param in params.values()]
        held = {name: next(values) for name in buffers}
        leaves = [
            value.requires_grad_(True) if training and given.requires_grad else value
            for given, value in zip(inputs, values, strict=True)
        ]
        stand_ins = dict(zip((*params.values(), *buffers.values()), (*fresh, *held.values()), strict=True))
        # backward() stays inside: activation checkpointing runs the module again there.
        tensors = ReplacedTensors(model, dict(zip(params, fresh, strict=True)), held)
        with (
            substituted(model, stand_ins, tensors.set_data, *(() if reads is None else (reads.values,))),
            tensors.watched(),
            recorder.recording(),
            torch.set_grad_enabled(training),
            nullcontext() if reads is None else reads.recording(),
            own_attributes(stand_ins, reads),
        ):
            results = results_of(model, leaves, recorder)
            tensors.settle()
            seeds: list[torch.Tensor | None] = [None for _ in results]
            if training:
                if not seeded:
                    _check_differentiable(results[0])
                else:
                    seeds = [torch.empty_like(result) if result.requires_grad else None for result in results]
                own = {id(value) for value in (*fresh, *held.values(), *leaves)}
                given = [None if seed is None else seed.clone() for seed in seeds]  # a backward may change it in place
                begun = [(each, seed) for each, seed in zip(results, given, strict=True) if each.requires_grad]
                begun = begun if seeded else [(results[0], None)]
                with (
                    recorder.backward(),
                    torch._C._DisableAutocast(),  # as where backward() stands behind the autocast block
                    other_gradients_kept([each for each, _ in begun], own),
                    functions.watched(results) if seeded else nullcontext(),
                ):
                    torch.autograd.backward([each for each, _ in begun], [seed for _, seed in begun])
        count = len(results)
        return [*results, *seeds, *(param.grad for param in fresh), *(leaf.grad for leaf in leaves if seeded)]

    # Without symbolic shapes an op whose result depends on values raises at once, where the user wrote it.
    fake = FakeTensors(allow_fallback_kernels=True, allow_non_fake_inputs=True)
    device = device_of(model, inputs)
    own = (*params.values(), *buffers.values(), *inputs)
    flat = [traced_tensor(fake, value.detach(), device) for value in own]
    with (
        ops.tracing_on(mesh),
        marks_traced(model, batch) if marked else nullcontext(),
        traceable_torch(),
        functions_noted(),
        eager_collectives_refused(),
        patched_here(nn.SyncBatchNorm, "forward", sync_batch_norm(mesh, marked)),
        without_anomaly_detection(),
        outer_hooks_masked(),
        own_mode_kept(model),
        storage_offsets_refused(flat),
        torch.autograd.set_multithreading_enabled(False),
        quick_recording(),
        _use_lazy_graph_module(True),  # only the graphs are read: generating their code takes a tenth of the time
    ):
        try:
            with recorder.random.patched(), fake:
                traced = make_fx(
                    step, decomposition_table=_recorded_as(mesh, marked), _disable_torch_fn_metadata_mode=True
                )(*(value.detach() for value in flat))
        except _DATA_DEPENDENT as error:
            raise _not_traceable(error, recorder) from error
        except CaptureError as error:
            raise _locate(error, recorder).with_traceback(error.__traceback__) from error.__cause__
        except RuntimeError as error:
            if isinstance(error.__cause__, CaptureError):  # torch has wrapped it on its way
                raise _locate(error.__cause__.with_traceback(error.__traceback__), recorder) from None
            if _CHANGED_SAVED in str(error):
                raise recorder.changes.explained(error).with_traceback(error.__traceback__) from None
            if _OF_TURNED in str(error):
                refuse_turned(recorder.turned)
            if _COMPILED in str(error):
                raise _locate(CaptureError(_CALLS_COMPILED).with_traceback(error.__traceback__), recorder) from error
            if is_of_meta(error):
                raise _locate(CaptureError(OTHER_META).with_traceback(error.__traceback__), recorder) from error
            if not any(text in str(error) for text in _NO_DATA):
                raise
            raise _not_traceable(error, recorder) from error
        finally:
            if reads is not None:
                reads.python_numbers = recorder.numbers.found
            replaced = recorder.attributes.restore()
        refuse_kept_tensors(model)
        _check_constants(traced, recorder.attributes, replaced)
        refuse_changes(traced.graph)
        refuse_turned(recorder.turned)
        numbers = return_early_values(traced.graph) if seeded else []
        decompositions = {**(_SUMS if marked else {}), **BATCH_NORMS, **_COMPUTED}
        with torch._C._DisableAutocast(), fake:
            functional = make_functional(traced, [value.detach() for value in flat], decompositions)
    return _read(functional, count, len(params), numbers, recorder.calls, functions)


def _recorded_as(mesh: Mesh, marked: bool) -> dict[Any, Callable[..., Any]]:
    """Decompositions that are applied when ops are recorded, below autograd."""
    return {**(WITHOUT_WORKSPACE if marked else WITH_WORKSPACE), **CUDNN, **functional_collectives(mesh, marked)}


def _stand_in(param: nn.Parameter, value: torch.Tensor, training: bool, seeded: bool) -> torch.Tensor:
    """Make a traced value stand for a parameter, with the user's hooks.

    A step cannot run hooks on `.grad`, so it raises CaptureError for them. A module (`seeded`) runs them itself, after
    it has written `.grad`.
    """
    made = value.requires_grad_(training and param.requires_grad)
    made._is_param = True  # what isinstance asks for
    if made.requires_grad:
        for hook in (param._backward_hooks or {}).values():
            made.register_hook(hook)
        for after in () if seeded else (param._post_accumulate_grad_hooks or {}).values():
            raise CaptureError(
                f"a parameter has a post-accumulate-grad hook ({getattr(after, '__qualname__', after)}): it would run "
                "on traced gradients, so remove it, or run its code after the step"
            )
    return made


def _check_constants(traced: fx.GraphModule, attributes: Attributes, replaced: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError if the step changes a constant: a tensor that is no parameter, buffer or input."""
    roots = Roots(traced.graph)

    def refuse(node: fx.Node, constant: torch.Tensor) -> NoReturn:
        raise CaptureError(f"{origin_of(node).place}: {attributes.refusal(constant)}")

    for node in traced.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(traced, str(node.target))
            if isinstance(constant, FakeTensor):
                raise CaptureError(
                    f"{origin_of(next(iter(node.users), node)).place}: a tensor comes there from a call "
                    "that tracing cannot follow, such as as_subclass() or Tensor._make_subclass(): leave that call out"
                )
            if any(constant is old for old in replaced):
                refuse(next(iter(node.users), node), constant)
        for target in written_nodes(node):
            root = roots[target]
            if root.op == "get_attr":
                refuse(node, getattr(traced, str(root.target)))


def _check_differentiable(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: unfreeze one "
            "(param.requires_grad_(True)), or check that the model's output reaches the loss without detach() or "
            "torch.no_grad()"
        )


def _not_traceable(error: BaseException, recorder: OriginRecorder) -> CaptureError:
    where = user_line_of(error.__traceback__) or "an unknown line"
    module = recorder.module or "the top-level module"
    inside = innermost_function(error.__traceback__)
    return CaptureError(
        f"cannot trace {module} at {where}: {inside or 'the program'} depends on the value of a tensor there "
        "(an `if` or `while` on a tensor, .item(), .tolist(), a boolean mask or nonzero() whose size is not known). "
        "Write it without a Python decision on tensor values, for example with torch.where or a fixed size; or let "
        'cf.compile(model, capture="dynamo") cut the model into several graphs. '
        f"[{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}]"
    )


def _locate(error: CaptureError, recorder: OriginRecorder) -> CaptureError:
    """The same error with the module and the source line where it was raised."""
    where = user_line_of(error.__traceback__)
    if not where or str(error).startswith("cannot trace"):
        return error
    return CaptureError(f"cannot trace {recorder.module or 'the top-level module'} at {where}: {error}")


def _read(
    module: fx.GraphModule,
    num_results: int,
    num_params: int,
    written_late: Sequence[int],
    calls: CallPaths,
    functions: FunctionGradients,
) -> Traced:
    graph = module.graph
    _drop_aliases(graph)
    drop_copies_of_gradients(graph, 2 * num_results)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    mutations: dict[fx.Node, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}  # a copy_ into a placeholder -> that placeholder
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default:
            continue
        target, value = node.args[:2]
        target = written.get(target, target)
        if target.op == "placeholder":
            written[node] = target
            mutations[target] = value
    for node in reversed(written):
        value = node.args[1]
        assert isinstance(value, fx.Node)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    early = take_early_values(graph, written_late)
    found: Any = graph.output_node().args[0]
    returned = iter(found)
    results, seeds = (list(islice(returned, num_results)) for _ in range(2))
    grads, input_grads = list(islice(returned, num_params)), list(returned)
    for seed in [seed for seed in seeds if seed is not None]:
        for copied in [user for user in seed.users if user.target is aten.clone.default][:1]:
            copied.replace_all_uses_with(seed)
            graph.erase_node(copied)
    constants = {str(node.target): getattr(module, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
    changes = list(mutations.items())
    return Traced(graph, constants, placeholders, results, seeds, grads, input_grads, changes, early, calls, functions)


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove nodes that only stand for another node, as autograd and functionalization leave them.

    Aliases of constants stay, because a constant must not be handed out as a value that other code may write to. Those
    of gradients that a function may miss stay, too.
    """
    for node in list(graph.nodes):
        if node.target in ALIASES and node.args[0].op != "get_attr" and not is_gradient(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_SUMS: Mapping[Any, Callable[..., Any]] = {
    op: function for op in decomposed() if (function := decompose(op)) is not None
}


def _conjugate(value: Any) -> Any:
    return torch.ops.aten._conj_physical(value) if isinstance(value, torch.Tensor) else value.conjugate()


_COMPUTED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._conj.default: _conjugate,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Views that leave it to later ops to compute what they mean. Collectives do not, and neither does what reads memory as
it is, such as `.real` of the conjugate of a conjugate that a rank has got from others."""
