"""The compiled module that users call in place of their model, as they would call DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.late.past_gradients import PastGradients
from commfuse_fx.calls.module_backward import Calls, ModuleCall, learns
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.capture.guards.tree import unflatten
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import NotAvailableError, VirtualWorldError
from commfuse_fx.frontends.accelerate_methods import teach_accelerate
from commfuse_fx.frontends.arguments_of_ddp import (
    count_of_fsdp,
    is_in_ddp,
    refuse_parts_of_flat_parameters,
    refuse_wrappers,
)
from commfuse_fx.frontends.clipping import clip_grad_norm
from commfuse_fx.frontends.join_context import ModuleJoin, ModuleJoinHook
from commfuse_fx.frontends.other_tracers import refuse_other_tracers
from commfuse_fx.frontends.stand_in import StandIn
from commfuse_fx.frontends.trained_model import check_model
from commfuse_fx.gradients.gradient_parts import zero_gradients
from commfuse_fx.gradients.parameter_hooks import remove_hooks_of_graphs
from commfuse_fx.gradients.uneven_batches import note_known
from commfuse_fx.inspect.explain.explanation import Explanation
from commfuse_fx.inspect.explain_graphs import GraphsExplanation
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.runtime.memory.modes import outside_inference_mode
from commfuse_fx.support.tracebacks import user_frames_only


class ModuleCompiler(CompiledCall):
    """What a compiled module knows of its model, ranks and plans."""

    form = "module"

    def _make_session(self) -> ModuleSession:
        return ModuleSession(self.planner, self.rank)


class CompiledModule(StandIn, Joinable):
    """A compiled module behaves as DistributedDataParallel does. `compile` makes it.

    `out = model(*inputs)` runs the compiled forward, and the backward that the caller starts runs the compiled one:
    afterwards `.grad` of every parameter holds the mean over the ranks. With gradients disabled the model runs as it
    is; where ranks hold rows of its parameters, a compiled forward gathers each for its use.

    module: the model that was compiled. Attributes, methods and `state_dict()` are the model's own. Another one that is
        assigned is compiled in its place, with the same options: all ranks do it together.
    require_backward_grad_sync: whether backwards of the forwards that follow reduce gradients.
    """

    require_backward_grad_sync: bool
    _config: CompileConfig
    _compiled: ModuleCompiler
    _calls: Calls
    _past: PastGradients | None
    _checked: tuple[int, object]
    _has_met: bool
    _join_config: Any

    def __init__(self, model: nn.Module, config: CompileConfig) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.require_backward_grad_sync = True
        self._config = config
        self.module = model

    def _bind(self, model: nn.Module) -> None:
        check_model(model)
        teach_accelerate(CompiledModule)
        compiled = ModuleCompiler(model, None, None, self._config)
        super()._bind(model)
        self.training = model.training
        self._compiled, self._calls, self._checked = compiled, Calls(), (-1, None)
        self._meet_ranks()

    @property
    def _session(self) -> ModuleSession:
        session = self._compiled.session
        assert isinstance(session, ModuleSession)
        return session

    def _meet_ranks(self) -> None:
        """Begin with the ranks that there are now: all go on with rank 0's parameters and buffers."""
        self._has_met = False
        self._past = None if self._session.agreement is None else PastGradients(self._compiled)
        if not self._compiled.virtual:
            self._session.send_start_values()
        self._has_met = True

    def _follow_world(self) -> None:
        """Go on with the process group that there is now, as `CompiledCall._follow_world`."""
        if self._compiled._follow_world() or not self._has_met:
            self._meet_ranks()

    @torch._disable_dynamo  # torch.compile of what holds this module leaves it as it is
    @user_frames_only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank. The result is what the model returns.

        Raises CaptureError where the model cannot be traced, and VirtualWorldError in a virtual world.
        """
        if self._compiled.virtual:
            raise VirtualWorldError(
                f"this module was compiled for a virtual world (device_num={self._compiled.config.device_num}), which "
                "has no devices to run on: leave device_num out and start the program under torchrun; lower() works"
            )
        self._follow_world()
        model = self._compiled.model  # asking for `self.module` costs more
        if not torch.is_grad_enabled() or not learns(model, args, kwargs):
            if self._checked[0] < 0:
                refuse_parts_of_flat_parameters(model)
            if self._session.gathers_for_evaluation(args, kwargs):
                with outside_inference_mode():
                    forward = self._session.forward(args, kwargs, False)
                return unflatten(forward.described.nest, iter(forward.outputs))
            return model(*args, **kwargs)
        refuse_other_tracers()
        known, params = count_of_fsdp(), self._compiled.planner.watch.params  # which the call before has looked at
        if self._checked[0] != known or self._checked[1] is not params or is_in_ddp():
            refuse_wrappers(self, model)
            self._checked = known, params
        if not self.require_backward_grad_sync:
            teach_accelerate(CompiledModule)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        remove_hooks_of_graphs(self._compiled.model)
        session, past, syncs = self._session, self._past, self.require_backward_grad_sync
        owes = self._begin_iteration(syncs)
        if past is not None:
            past.begin()
        forward = session.forward(args, kwargs, syncs or owes)
        if past is not None:
            past.look(forward.plan)
        if owes and not syncs:
            self._end_iteration()
        outputs = ModuleCall(session, forward, self._calls, syncs, None if past is None else past.wrote).apply()
        return unflatten(forward.described.nest, iter(outputs))

    def _begin_iteration(self, syncs: bool) -> bool:
        """In a `Join` context, before a forward: whether other ranks wait for what comes of it."""
        uneven = self._session.uneven
        if uneven is None:
            return False
        if self._join_config.enable:
            self._refuse_join()
        if not self._join_config.enable:
            uneven.leave()
            return False
        if uneven.owes and torch._C._current_graph_task_id() != -1:
            return True  # activation checkpointing computes the forward again
        try:
            uneven.end()  # the last forward had no backward
            Join.notify_join_context(self)
            uneven.begin(syncs)
        except Exception as error:
            note_known(error)
            raise
        return uneven.owes

    def _refuse_join(self) -> None:
        if self._session.divides:
            raise NotAvailableError(
                "join() with enable_parallel_optimizer=True is not available yet: a rank without batches would have to "
                "gather what the others use, and to hold rows of gradients. Give all ranks as many batches "
                "(drop_last), or compile the module without it"
            )

    def _end_iteration(self) -> None:
        if self._session.uneven is not None:
            self._session.uneven.end()

    @user_frames_only
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is `max_norm` at most, as torch.nn.utils.clip_grad_norm_ does it.

        Where the module divides gradients, the norm is that of all ranks' rows, and no gradient is gathered. In
        hybrid_parallel, what each rank has of parameters with `layerwise_parallel` counts as well. All ranks call it
        together in both cases. Returns the norm that the gradients had.
        """
        self._follow_world()
        return clip_grad_norm(self._session, dict(self.module.named_parameters()), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module. Where ranks hold rows of gradients, nothing is gathered for it."""
        zero_gradients(self.module.parameters(), self._session.parts, set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside the `with` block leave gradients as they are on this rank; the backward of a later one
        reduces the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Backwards inside the `with` block reduce gradients, also those of forwards that ran under `no_sync`.

        Raises NotAvailableError in a `join` context in which another rank has no more batches.
        """
        if self._session.uneven is not None and self._session.uneven.are_absent:
            raise NotAvailableError(
                "sync_in_backward() is not available in a join() context in which another rank has no more batches: "
                "that rank waits for a forward that reduces. Run the last forward outside of no_sync()"
            )
        with self._all_reduce():
            yield

    @contextmanager
    def _all_reduce(self) -> Iterator[None]:
        calls, before = self._calls, (self._calls.all_sync, self.require_backward_grad_sync)
        calls.all_sync = self.require_backward_grad_sync = True
        try:
            yield
        finally:
            calls.all_sync, self.require_backward_grad_sync = before

    @user_frames_only
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and compile a call without running it: forward and backward in one graph.

        The arguments are those of a call; tensors serve as examples of shape and dtype. It works in a virtual world.
        Raises what compiling raises.
        """
        self._follow_world()
        with torch.enable_grad():
            return self._compiled.lower(*args, **kwargs)

    def __repr__(self) -> str:
        """The model behind the name of this class, and what was compiled."""
        name, _, parts = super().__repr__().partition("(")
        return f"{name}(  # {self._compiled._summary()}{parts}"

    @user_frames_only
    def explain(self, cluster: Any = None, timings: bool = False) -> Explanation | GraphsExplanation:
        """Say why the graph that runs is as it is: that of the last backward.

        The arguments are those of `Lowered.explain`. Raises ConfigValueError where none has run yet.
        """
        return self._compiled.explain(cluster, timings)

    def profile_used(self) -> StepProfile | None:
        """As `CompiledStep.profile_used`; nodes are those of the backward."""
        return self._compiled.profile_used()

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context for ranks that have different numbers of batches, as that of DistributedDataParallel.

        A rank that has no more batches answers the others with zeros until all have none. At the end all ranks get the
        parameters and buffers of one that was among the last.

        divide_by_initial_world_size: whether means divide by all ranks, rather than by those that still have batches.
        throw_on_early_termination: whether all ranks raise once one has no more batches.
        """
        self._follow_world()
        if enable:
            self._refuse_join()
        return ModuleJoin(self, self._session, enable, throw_on_early_termination, divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does for the others when it has no more batches."""
        self._follow_world()
        return ModuleJoinHook(self, self._session, **kwargs)

    @property
    def join_device(self) -> torch.device:
        """Where the communication of `Join` takes place."""
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD

    def retrace(self) -> None:
        """Forget all graphs, so that the next call traces the model again."""
        self._compiled.planner.retrace()

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Raises NotAvailableError: what is sent is part of the compiled graph."""
        raise NotAvailableError(
            "register_comm_hook() is not available for a compiled module: what is sent is part of its graph. For "
            "the precision on the wire use gradient_fp32_sync; for a collective of your own cf.ops.all_reduce"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, with its own keys. Where ranks hold rows of parameters, it has copies: the memory of a
        whole parameter serves others later, and what is read into a state would be lost."""
        state = super().state_dict(*args, **kwargs)
        if self._session.gathers and not kwargs.get("keep_vars", False):
            with torch._C.DisableTorchFunctionSubclass():
                held = {param.untyped_storage()._cdata for param in self.module.parameters()}
                for name, value in list(state.items()):
                    if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in held:
                        state[name] = value.clone()
        return state

    def __getstate__(self) -> dict[str, Any]:
        if not self._compiled.virtual and self._session.agreement is not None:
            raise NotAvailableError(
                "a compiled module of several ranks cannot be copied or pickled, as it holds their process groups: "
                "copy or save its model (model.module, model.state_dict()), and compile the copy on all ranks"
            )
        return self.__dict__
