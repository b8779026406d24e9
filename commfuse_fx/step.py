"""The compiled step that users call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.loss import LossFn, name_arguments
from commfuse_fx.capture.signature import Signature, Watch
from commfuse_fx.capture.tree import Structure, flatten
from commfuse_fx.compiler import Compiled, compile_call
from commfuse_fx.config import CompileConfig
from commfuse_fx.errors import ConfigValueError, VirtualWorldError
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import OptimizerInfo
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.lowered import Lowered
from commfuse_fx.optim import check_optimizer, describe_optimizer
from commfuse_fx.progress import progress
from commfuse_fx.runtime.broadcast import broadcast_parameters
from commfuse_fx.runtime.agreement import Agreement, checksum, hash62
from commfuse_fx.runtime.executor import Executor
from commfuse_fx.runtime.groups import Groups
from commfuse_fx.runtime.storage import LayoutConflict
from commfuse_fx.runtime.world import get_group_size, get_rank

log = logging.getLogger("commfuse_fx")

MAX_GRAPHS = 16
"""Graphs kept per compiled step; the least recently used one goes first."""


@dataclass
class _Plan:
    compiled: Compiled
    executor: Executor | None = None
    signature: int = 0
    texts: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, taken apart."""

    structure: Structure
    leaves: list[tuple[str, torch.Tensor]]


class CompiledStep:
    """A training step, traced, fused and scheduled. Made by `compile`.

    `step(*inputs)` runs it and returns the loss (a detached scalar of this rank's batch). With an
    optimizer one call is a whole step; without one, synchronised gradients are added to `param.grad`.
    When the model is in eval mode the call computes the loss and changes nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        config: CompileConfig,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.config = config
        self.virtual = config.device_num is not None
        self.rank = config.global_rank if config.global_rank is not None else get_rank()
        self.mesh = _mesh_of(config)
        self._plans: OrderedDict[Signature, _Plan] = OrderedDict()
        self._last: Signature | None = None
        self._watch = Watch(model, optimizer)
        self._groups: Groups | None = None
        self._agreement: Agreement | None = None
        self._started = False
        self._checksum = 0
        if not self.virtual and self.mesh.world > 1 and config.parallel_mode != "stand_alone":
            device_mesh = config.mesh if hasattr(config.mesh, "mesh_dim_names") else None
            device = next((p.device.type for p in model.parameters()), "cpu")
            self._groups = Groups.of_world(self.mesh, device, device_mesh)
            self._agreement = Agreement()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.virtual:
            raise VirtualWorldError(
                f"this step was compiled for a virtual world (device_num={self.config.device_num}), which has no "
                "devices to run on: leave device_num out and start the program under torchrun; lower() works here"
            )
        if self._agreement is None:
            return self._run(args, kwargs)
        self._agreement.begin_step()
        try:
            return self._run(args, kwargs)
        except Exception as error:
            # The others wait for this rank's vote, unless this is an evaluation, in which nobody votes.
            if self.model.training and not self._agreement.has_voted:
                self._agreement.fail(error)
            raise

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and compile a call without running it.

        Takes the arguments of the step itself; tensors serve as examples of shape and dtype. Works in a
        virtual world. Raises what compiling raises.
        """
        call = self._take_apart(args, kwargs)
        signature = self._signature(call)
        plan = self._plans.get(signature)
        if plan is None or plan.compiled.captured is None:
            plan = self._plans[signature] = self._compile(call, keep_captured=True)
        return Lowered(plan.compiled.program, self.rank, plan.compiled.replay)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        call = self._take_apart(args, kwargs)
        plan = self._plan(call)
        executor = self._executor(plan, call)
        if not self._started:
            self._start(plan)
        loss, *grads = executor.run(dict(call.leaves))
        if self.optimizer is not None and self.model.training:
            # What a learning-rate scheduler looks at to see that optimizer steps came first.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for name, grad in zip(plan.compiled.program.grads, grads, strict=True):
            _accumulate(executor.params[name], grad)
        result: torch.Tensor = loss
        return result

    # Compiling

    def _take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        arguments = name_arguments(args, kwargs, self.loss_fn)
        leaves, structure = flatten(arguments, "")
        return _Call(structure, [(_path(path), tensor) for path, tensor in leaves])

    def _signature(self, call: _Call) -> Signature:
        return self._watch.signature(call.structure, [tensor for _, tensor in call.leaves])

    def _plan(self, call: _Call) -> _Plan:
        signature = self._signature(call)
        plan = self._plans.get(signature)
        if plan is None:
            if self._last is not None:
                log.info("re-tracing: %s", signature.difference(self._last))
            plan = self._plans[signature] = self._compile(call)
            while len(self._plans) > MAX_GRAPHS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(signature)
        self._last = signature
        return plan

    def _compile(
        self, call: _Call, keep_captured: bool = False, flat_updates: bool = True, opaque: str = ""
    ) -> _Plan:
        training = self.model.training
        optimizer = self._describe_optimizer(opaque) if training else None
        leaves, sliced = self._slice_batch(call.leaves)
        with progress("compiling the training step" if training else "compiling the evaluation step"):
            compiled = compile_call(
                self.model,
                self.loss_fn,
                call.structure,
                leaves,
                self.mesh,
                self.config,
                training,
                optimizer,
                sliced,
                flat_updates,
                keep_captured,
            )
        for record in compiled.records:
            log.debug(
                "pass %s: %s, %d -> %d nodes, %.1f ms",
                record.name,
                "modified" if record.modified else "unchanged",
                record.nodes_before,
                record.nodes_after,
                record.seconds * 1e3,
            )
        return _Plan(compiled)

    def _describe_optimizer(self, opaque: str) -> OptimizerInfo | None:
        if self.optimizer is None:
            return None
        check_optimizer(self.optimizer, self.model)
        described = describe_optimizer(self.optimizer, self.model)
        return replace(described, rule="opaque", why_opaque=opaque) if opaque else described

    def _slice_batch(
        self, leaves: list[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
        """With full_batch the model is traced on a slice: tensors whose dimension 0 is that of the first one."""
        batched = [tensor for _, tensor in leaves if tensor.ndim]
        if not self.config.full_batch or self.mesh.world == 1 or not batched:
            return leaves, []
        if self.config.parallel_mode == "stand_alone":
            return leaves, []
        batch = batched[0].shape[0]
        if batch % self.mesh.world:
            raise ConfigValueError(
                f"full_batch=True: the global batch of {batch} does not divide by {self.mesh.world} devices; "
                f"pad or cut it to {batch - batch % self.mesh.world or self.mesh.world} rows"
            )
        rows = batch // self.mesh.world
        sliced = [path for path, tensor in leaves if tensor.ndim and tensor.shape[0] == batch]
        local = [(path, tensor[:rows] if path in sliced else tensor) for path, tensor in leaves]
        return local, sliced

    # Running

    def _executor(self, plan: _Plan, call: _Call) -> Executor:
        """The plan's executor, bound to the optimizer's present state; re-plans where that state demands it."""
        if plan.executor is None or plan.executor.params is not self._watch.params:
            self._make_executor(plan)
        executor = plan.executor
        assert executor is not None
        if not executor.storage.is_bound():
            try:
                executor.storage.bind()
            except LayoutConflict as conflict:
                log.info("re-planning the update: %s", conflict)
                opaque = str(conflict) if conflict.remedy == "opaque" else ""
                plan.compiled = self._compile(call, flat_updates=False, opaque=opaque).compiled
                self._make_executor(plan)
                plan.executor.storage.bind()
        assert plan.executor is not None
        return plan.executor

    def _make_executor(self, plan: _Plan) -> None:
        program = plan.compiled.program
        executor = Executor(
            program, self._watch.params, self._watch.buffers, self.optimizer, self._groups, self.rank
        )
        if self._agreement is not None and executor.has_collectives:
            plan.texts = (canonical_text(program, activations=False), canonical_text(program))
            plan.signature = hash62(plan.texts[0])
        executor.prepare(lambda: self._cast_vote(plan), lambda: self._settle_vote(plan))
        plan.executor = executor

    def _start(self, plan: _Plan) -> None:
        """Before the first step: agree on the plan, then send or compare the parameters' first values."""
        self._started = True
        if self._agreement is None or plan.executor is None or not plan.executor.has_collectives:
            return
        shared = [
            param.detach()
            for name, param in self._watch.params.items()
            if not (
                self.config.parallel_mode == "hybrid_parallel" and getattr(param, "layerwise_parallel", False)
            )
        ]
        if self.config.parameter_broadcast:
            self._agreement.cast(plan.signature)
            self._agreement.settle(plan.texts)
            self._agreement.begin_step()
            broadcast_parameters(shared)
        else:
            self._checksum = checksum(shared)

    def _cast_vote(self, plan: _Plan) -> None:
        assert self._agreement is not None
        self._agreement.cast(plan.signature, self._checksum)
        self._checksum = 0

    def _settle_vote(self, plan: _Plan) -> None:
        assert self._agreement is not None
        self._agreement.settle(plan.texts)


def _accumulate(param: nn.Parameter, grad: torch.Tensor) -> None:
    """As autograd does: the first gradient is kept, later ones are added to it."""
    if param.grad is None:
        param.grad = grad
    else:
        with torch.no_grad():
            param.grad.add_(grad)


def _path(path: str) -> str:
    """`input.0`, `input.mask` and `target` from the paths of the flattened arguments."""
    return path.removeprefix(".").replace("input.args.", "input.").replace("input.kwargs.", "input.")


def _mesh_of(config: CompileConfig) -> Mesh:
    if config.mesh is not None:
        if isinstance(config.mesh, tuple):
            return Mesh.of_sizes(config.mesh)
        return Mesh.of_device_mesh(config.mesh)
    return Mesh.of_sizes((config.device_num or get_group_size(),))
