"""The compiled step that users call."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.loss import LossFn
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import CommFuseError, NotAvailableError, PlanMismatchError, VirtualWorldError
from commfuse_fx.inspect.lowered import Lowered, LoweredCall
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import communication_text
from commfuse_fx.machine.source import default_cluster, priced_for, resolve_costs
from commfuse_fx.machine.step_profile import StepProfile, model_fingerprint
from commfuse_fx.measure.profiling import profile_step, with_overhead
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Call, Planner
from commfuse_fx.planning.shared_prices import Seconds
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.modes import outside_inference_mode
from commfuse_fx.runtime.execute.socket_threads import let_lock_holders_run
from commfuse_fx.runtime.execute.timeline import Timeline
from commfuse_fx.runtime.memory.host_memory import keep_freed_memory
from commfuse_fx.runtime.memory.layout import divided_parameters
from commfuse_fx.runtime.memory.own_storage import separated
from commfuse_fx.runtime.memory.shards import Shards, layouts_of
from commfuse_fx.runtime.memory.storage import FlatPool, LayoutConflict
from commfuse_fx.runtime.ranks.agreement import Agreement, Ballot, checksum
from commfuse_fx.runtime.ranks.ballot_box import release_ballot_boxes
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters
from commfuse_fx.runtime.ranks.callers import OutOfTurn, lock_of, making_a_step
from commfuse_fx.runtime.ranks.exchange import LONGEST_WAIT, Exchange, ProcessExchange
from commfuse_fx.runtime.ranks.forks import check_process, process
from commfuse_fx.runtime.ranks.groups import Groups
from commfuse_fx.runtime.ranks.seeds import Seeds
from commfuse_fx.runtime.ranks.world import get_group_size, get_rank, world_timeout
from commfuse_fx.support.logs import configure_logs, logger
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.support.warned import warn_once_per_step

_PLAN = logger("plan")


class CompiledStep:
    """A training step, traced, fused and scheduled. Made by `compile`.

    `step(*inputs)` runs it and returns the loss (a detached scalar of this rank's batch). With an
    optimizer one call is a whole step; without one, synchronised gradients are added to `param.grad`.
    When the model is in eval mode the call computes the loss and changes nothing. With gradients disabled
    (torch.no_grad(), torch.inference_mode()) a model in training mode is evaluated as in eager PyTorch: dropout is
    active and BatchNorm statistics move, parameters, gradients and optimizer state do not.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        config: CompileConfig,
    ) -> None:
        configure_logs()
        warn_once_per_step()
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.config = config
        self.virtual = config.device_num is not None
        self.rank = config.global_rank if config.global_rank is not None else get_rank()
        self.mesh = _mesh_of(config)
        self.config = config = _priced(config, model, self.mesh)
        self.planner = Planner(model, loss_fn, optimizer, config, self.mesh, self.rank)
        self._groups: Groups | None = None
        self._agreement: Agreement | None = None
        self._pool = FlatPool()
        self._timeline: Timeline | None = None
        self._running: Executor | None = None  # that of the last step, which may have left something on the wire
        self._shards: Shards | None = None  # those of the last step, whose parameters may be divided
        self._known_shards: dict[Any, Shards] = {}
        self._exchanges = 0
        self._process = process()
        self._calls = 0
        self._undone_calls = 0  # of them, those of `profile`
        self._started = False
        self._checksum = 0
        if not self.virtual and self.mesh.world > 1 and config.parallel_mode != "stand_alone":
            device_mesh = config.mesh if hasattr(config.mesh, "mesh_dim_names") else None
            device = next((p.device.type for p in model.parameters()), "cpu")
            with making_a_step():
                self._groups = Groups.of_world(self.mesh, device, device_mesh)
                self._agreement = Agreement()
            _holders_of_groups.add(self)
        self._seeds = Seeds(self.rank, None if self._agreement is None else self._agreement.name)

    @user_frames_only
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.virtual:
            raise VirtualWorldError(
                f"this step was compiled for a virtual world (device_num={self.config.device_num}), which has no "
                "devices to run on: leave device_num out and start the program under torchrun; lower() works here"
            )
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                return self(*args, **kwargs)
        if self._agreement is None:
            with lock_of(self.model):
                self._calls += 1
                return self._run(args, kwargs)
        self._check_process()
        with self._agreement.callers.turn(self._agreement.number):
            self._calls += 1
            while True:
                try:
                    return self._call(self._agreement, args, kwargs)
                except OutOfTurn as other:
                    self._let_first(self._agreement, other.first)

    def __getstate__(self) -> dict[str, Any]:
        if self._agreement is not None:
            raise NotAvailableError(
                "a compiled step of several ranks cannot be copied or pickled, as it holds their process groups: copy "
                "model and optimizer (copy.deepcopy, state_dict()), and compile a step for the copy on all ranks"
            )
        return self.__dict__

    @user_frames_only
    def synchronize(self) -> None:
        """Wait until the last step is complete.

        With `ScheduleConfig(across_steps=True)` a call returns while gradients are still on the wire. Reading a
        parameter or the optimizer's state waits by itself; this is for the cases that it cannot see, such as
        an alias (`param.data`) that was made before. Raises CollectiveError when the communication fails.
        """
        if self._running is not None:
            self._running.synchronize()

    def retrace(self) -> None:
        """Forget all graphs, so that the next call traces the model again.

        For what a step cannot see by itself: globals, environment variables, values behind closures of helper
        functions (docs/what-is-fixed.md). Parameters, optimizer state and buffers stay what they are. Call it on all
        ranks: one that traces another graph than the others ends the step with a PlanMismatchError on all of them.
        Raises CollectiveError when updates of the last step are still to come and their communication fails.
        """
        self.synchronize()
        self.planner.retrace()

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside the `with` block parameters that are divided among ranks have memory, but no values: enough to trace
        the model with, and nothing has to be gathered for it."""
        if self._shards is None:
            yield
            return
        with self._shards.shapes_only():
            yield

    @user_frames_only
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and compile a call without running it.

        Takes the arguments of the step itself; tensors serve as examples of shape and dtype. Works in a
        virtual world. Raises what compiling raises.
        """
        self.synchronize()
        with lock_of(self.model), outside_inference_mode(), self.shapes_only():
            compiled = self.planner.read(self.planner.take_apart(args, kwargs))
        call = LoweredCall(self, args, kwargs)
        return Lowered(
            compiled.program, self.rank, compiled.records, compiled.replay, call, compiled.captured, compiled.pipeline
        )

    @user_frames_only
    def profile(self, *args: Any, rounds: int = 5, cluster: Any = None, **kwargs: Any) -> StepProfile:
        """Measure what every compute node of this call takes, on the actual ranks; the medians are the same on all.

        args, kwargs: those of a call. rounds: how often the step is run; parameters, gradients, buffers, optimizer
        state and random numbers are afterwards what they were. cluster: what collectives cost (`commfuse calibrate`
        measures that); None: the step's own cluster. The result is what `compile` takes as `cluster=`. Call it on all
        ranks together.

        Raises VirtualWorldError in a virtual world, and what a call raises.
        """
        if self.virtual:
            raise VirtualWorldError("profile() measures real ranks: leave device_num out and start under torchrun")
        self._check_process()
        with self._turn():
            return self._profile(args, kwargs, rounds, cluster)

    def _profile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rounds: int, cluster: Any) -> StepProfile:
        self.synchronize()
        call = self.planner.take_apart(args, kwargs)
        executor = self._executor(self._plan(call), call)
        given = self.config.cluster if cluster is None else resolve_costs(cluster)
        if isinstance(given, StepProfile):
            given = given.cluster
        params = dict(self.model.named_parameters())
        device = next((param.device.type for param in params.values()), "cpu")
        given = default_cluster(device, self.mesh.world) if given is None else given
        inputs = dict(call.leaves)
        measured = profile_step(executor, inputs, given, rounds, model_fingerprint(params))
        with self._calls_undone(executor):
            return with_overhead(
                measured, executor, inputs, lambda: self(*args, **kwargs), self.synchronize, max(rounds, 3)
            )

    @contextmanager
    def _calls_undone(self, executor: Executor) -> Iterator[None]:
        """Calls inside the block do not count for what comes after: for seeds, for parameters that rank 0 has still to
        send, and for those that were whole."""
        calls, started = self._calls, self._started
        shards = executor.shards
        whole = [] if shards is None or shards.is_divided else list(executor.params.values())
        kept = [param.detach().clone() for param in whole]
        try:
            yield
        finally:
            self._undone_calls += self._calls - calls
            if self.config.parameter_broadcast:  # what was sent has been undone as well
                self._started = started
        if shards is not None and whole:
            shards.open()
            with torch.no_grad():
                for param, before in zip(whole, kept, strict=True):
                    param.copy_(before)

    @contextmanager
    def record_communication(self) -> Iterator[Timeline]:
        """Measure, on this rank, the communication of the steps that run inside the `with` block.

        The timeline tells for each collective how long it was in flight and for how long of that the step
        was blocked; it includes the vote of the ranks, where there is one. Raises NotAvailableError for a model on
        CUDA, whose waits do not block the host.
        """
        if any(param.is_cuda for param in self.model.parameters()):
            raise NotAvailableError(
                "record_communication() is not available yet for a model on CUDA: its waits do not block the host, "
                "whose clock is used here; use torch.profiler"
            )
        self._timeline = Timeline()
        try:
            yield self._timeline
        finally:
            self._timeline = None

    def _call(self, agreement: Agreement, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        agreement.begin_step()
        try:
            with lock_of(self.model):
                return self._run(args, kwargs)
        except BaseException as error:
            lost = self._running is not None and self._running.tail.failed
            agreement.leave_step(error, expected=self._votes(), lost=lost)
            raise

    @staticmethod
    def _let_first(agreement: Agreement, first: int) -> None:
        """The vote has shown that rank 0 runs this step next: if it is another one, its thread goes first here, too."""
        if first == agreement.number:
            return
        try:
            agreement.callers.let_first(first, agreement.number, min(world_timeout() / 2, LONGEST_WAIT).total_seconds())
        except CommFuseError as error:
            agreement.begin_step()
            agreement.leave_step(error, expected=True)
            raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with ExitStack() as entered:
            if self._agreement is not None:
                entered.enter_context(self._agreement.callers.turn(self._agreement.number))
            entered.enter_context(lock_of(self.model))
            yield

    def _check_process(self) -> None:
        if self._agreement is not None:
            check_process(
                self._process,
                "this step talks to other ranks, which only the parent can: call it there, or start programs of their "
                "own (torchrun) and compile a step in each",
            )

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        call = self.planner.take_apart(args, kwargs)
        if self._agreement is None or not self.config.plans_by_cost:
            return self._run_call(call)
        random = torch.get_rng_state()
        try:
            return self._run_call(call)
        except PlanMismatchError as error:
            if not error.may_agree:
                raise
            self._plan_in_common(call, error)
        torch.set_rng_state(random)
        return self._run_call(call)

    def _plan_in_common(self, call: Call, mismatch: PlanMismatchError) -> None:
        """Batches of other sizes have led to other plans: all ranks plan again, with what nodes take on rank 0.

        Nothing has been sent yet, and all ranks know from the vote that they come here.
        """
        assert self._agreement is not None
        _PLAN.info("planning again, with what nodes take on rank 0, since plans differ between ranks: %s", mismatch)
        offered: Seconds | None = None
        try:
            if self.rank == 0:
                offered = self.planner.seconds_by_name(call)
        finally:
            seconds = self._agreement.from_rank_0(offered)
        if seconds is None:
            raise mismatch
        self.planner.plan_in_common(seconds)
        self._agreement.begin_step()

    def _run_call(self, call: Call) -> torch.Tensor:
        if self._running is not None:
            self._running.tail.check()
        plan = self._plan_that_runs(call)
        if plan is None:
            self.synchronize()
            plan = self._plan(call)
            self._running = self._executor(plan, call)
        executor = self._running
        assert executor is not None
        self._watch_wire(executor)
        if not self._started:
            self._start(plan)
        if executor.needs_seed:
            executor.seed = self._seeds.of_step(self._calls - self._undone_calls)
        loss, *grads = executor.run(dict(call.leaves))
        if self._agreement is not None:
            self._agreement.end_step()
        if self.optimizer is not None and plan.compiled.program.training:
            # What a learning-rate scheduler looks at to see that optimizer steps came first.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if grads:
            with interrupts_deferred():
                for name, grad in zip(plan.compiled.program.grads, grads, strict=True):
                    accumulate(executor.params[name], grad)
        result: torch.Tensor = loss
        return result

    def _plan_that_runs(self, call: Call) -> Plan | None:
        """The plan of the last step, if it serves this call too and may go on while its tail is on the wire."""
        # Looks at guarded parameters, but not at their values.
        with torch._C.DisableTorchFunctionSubclass():
            plan = self.planner.known_plan(call)
            running = self._running
            if plan is None or running is None or running is not plan.executor:
                return None
            return plan if running.params is self.planner.watch.params and running.is_bound() else None

    def _plan(self, call: Call) -> Plan:
        with self.shapes_only():
            return self.planner.plan(call)

    def _watch_wire(self, executor: Executor) -> None:
        """Let the running timeline, if there is one, see this step's collectives."""
        executor.wire.timeline = self._timeline
        if self._agreement is not None:
            self._agreement.timeline = self._timeline
        if self._timeline is not None:
            self._timeline.begin_step()

    def _executor(self, plan: Plan, call: Call) -> Executor:
        """The plan's executor, bound to the optimizer's present state; re-plans where that state demands it."""
        executor = plan.executor
        if executor is None or executor.params is not self.planner.watch.params:
            self.planner.forget_replaced_parameters()
            executor = self._make_executor(plan)
        self._hand_over(executor)
        if not executor.is_bound():
            try:
                executor.bind()
            except LayoutConflict as conflict:
                with self.shapes_only():
                    self.planner.replan(plan, call, conflict)
                executor = self._make_executor(plan)
                self._hand_over(executor)
                executor.bind()
        return executor

    def _hand_over(self, executor: Executor) -> None:
        """Parameters that the next program divides in another way, or not at all, have to be whole before it."""
        if self._shards is not None and self._shards is not executor.shards:
            self._shards.open()
        self._shards = executor.shards

    def _make_executor(self, plan: Plan) -> Executor:
        program = plan.compiled.program
        executor = Executor(
            program,
            self.planner.watch.params,
            self.planner.watch.buffers,
            self.optimizer,
            None if self._groups is None else self._groups.on(program.mesh),
            self.rank,
            self._pool,
            self._shards_of(program),
        )
        if self._agreement is not None and executor.has_collectives:
            texts = plan.compiled.voted
            assert texts is not None, "a step of several ranks"
            plan.ballot = Ballot(
                self._agreement.number,
                type(self.model).__qualname__,
                *texts,
                communication_text(program),
                self.planner.has_common_plan or not self.config.plans_by_cost,
            )
            executor.wire.distress = self._agreement.distress
        executor.prepare(lambda: self._cast_vote(plan), lambda: self._settle_vote(plan))
        if executor.has_collectives:
            let_lock_holders_run()
        if any(param.is_cpu for param in executor.params.values()):
            keep_freed_memory()
        plan.executor = executor
        return executor

    def _shards_of(self, program: Program) -> Shards | None:
        """The same ones for all programs that divide the same parameters alike."""
        if self.optimizer is None or not divided_parameters(program):
            return None
        params = self.planner.watch.params
        key = layouts_of(program)
        known = self._known_shards.get(key)
        if known is None or known.params is not params:
            exchange = self._make_exchange(program.mesh)
            known = Shards(program, params, self.optimizer, self.rank, exchange, self.synchronize)
            self._known_shards[key] = known
        return known

    def _make_exchange(self, mesh: Mesh) -> Exchange:
        assert self._agreement is not None, "a world of several ranks"
        self._exchanges += 1
        return ProcessExchange(mesh, self.rank, f"{self._agreement.name}/{self._exchanges}", lambda: self._calls)

    def _start(self, plan: Plan) -> None:
        """Before the first step: agree on the plan, then send or compare the parameters' first values."""
        if self._agreement is None or plan.executor is None or not plan.executor.has_collectives:
            return  # an evaluation: the first step is still to come
        shared = [
            param.detach()
            for name, param in self.planner.watch.params.items()
            if not (self.config.parallel_mode == "hybrid_parallel" and getattr(param, "layerwise_parallel", False))
        ]
        if self.config.parameter_broadcast:
            self._cast_vote(plan)
            self._agreement.settle(_ballot(plan))
            self._agreement.begin_step()
            broadcast_parameters(shared)
            if plan.executor.shards is not None:
                plan.executor.shards.take()
        else:
            self._checksum = checksum(shared)

    def _cast_vote(self, plan: Plan) -> None:
        assert self._agreement is not None
        self._agreement.cast(_ballot(plan).signature, self._checksum)

    def _settle_vote(self, plan: Plan) -> None:
        assert self._agreement is not None
        self._agreement.settle(_ballot(plan))
        # Not before: a step in which a rank failed is not the first step of any rank.
        self._started = True
        self._checksum = 0
        if plan.executor is not None and plan.executor.shards is not None:
            plan.executor.shards.release()

    def _votes(self) -> bool:
        """Whether a call in the model's present mode votes: an evaluation does if the forward has collectives."""
        return self.planner.watch.trains or any(
            plan.ballot is not None and not plan.compiled.program.training for plan in self.planner.plans.values()
        )


_holders_of_groups: weakref.WeakSet[CompiledStep] = weakref.WeakSet()


@atexit.register
def _release_groups() -> None:
    """Let go of process groups while the interpreter is whole.

    Gloo's threads need the interpreter when they end. A group that lives until the interpreter is taken
    apart, in a reference cycle of a step, say, aborts the process ("terminate called without an active
    exception").
    """
    holders = list(_holders_of_groups)
    for step in holders:
        if step._process != process():
            continue  # a forked child: the groups are its parent's
        with suppress(CommFuseError):  # nobody is left to be told
            step.synchronize()
        step._running = None
        step.planner.plans.clear()
        for shards in step._known_shards.values():
            shards.exchange.release()
        step._groups = step._agreement = None
    release_ballot_boxes()
    if holders:
        gc.collect()


def _ballot(plan: Plan) -> Ballot:
    assert plan.ballot is not None, "a plan with collectives"
    return plan.ballot


def accumulate(param: nn.Parameter, grad: torch.Tensor) -> None:
    """As autograd does: the first gradient is kept, later ones are added to it."""
    if param.grad is None:
        param.grad = separated(grad)
    else:
        with torch.no_grad():
            param.grad.add_(grad)


def _priced(config: CompileConfig, model: nn.Module, mesh: Mesh) -> CompileConfig:
    """The configuration with the cluster that its plans need, and that the cluster was checked against."""
    if not config.plans_by_cost:
        return config
    params = dict(model.named_parameters())
    device = next((param.device.type for param in params.values()), "cpu")
    return replace(config, cluster=priced_for(config.cluster, device, mesh, params))


def _mesh_of(config: CompileConfig) -> Mesh:
    if config.mesh is not None:
        if isinstance(config.mesh, tuple):
            return Mesh.of_sizes(config.mesh)
        return Mesh.of_device_mesh(config.mesh)
    return Mesh.of_sizes((config.device_num or get_group_size(),))
