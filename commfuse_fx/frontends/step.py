"""The compiled step that users call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.verified_step import VerifiedStep
from commfuse_fx.calls.verified_steps import why_not
from commfuse_fx.checkpoints.checkpoints import Checkpoints
from commfuse_fx.checkpoints.saving import Saving
from commfuse_fx.checkpoints.step_state import StepState
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.errors import ConfigValueError, NotAvailableError, VirtualWorldError
from commfuse_fx.gradients.parameter_hooks import remove_hooks_of_graphs
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.kernels.described_optimizer import describe_optimizer
from commfuse_fx.machine.source import default_cluster, resolve_costs
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.measure.cuda_timeline import CudaTimeline
from commfuse_fx.measure.profiling import profile_step, with_overhead
from commfuse_fx.runtime.memory.modes import outside_inference_mode
from commfuse_fx.runtime.ranks.callers import lock_of
from commfuse_fx.support.checks import check_int
from commfuse_fx.support.tracebacks import user_frames_only


class CompiledStep(CompiledCall):
    """A compiled step runs one training step per call. `compile` makes it.

    `step(*inputs)` returns the loss, a detached scalar of this rank's batch. With an optimizer one call is a
    whole step; without one, synchronised gradients are added to `param.grad`.

    In eval mode a call computes the loss and changes nothing. With gradients disabled (torch.no_grad(),
    torch.inference_mode()) a model in training mode is evaluated as in eager PyTorch: dropout is active and
    BatchNorm statistics move, but parameters, gradients and optimizer state do not.
    """

    @user_frames_only
    @torch._disable_dynamo  # torch.compile of what holds this step leaves it as it is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this rank and return its loss; with `has_aux`, a pair of the loss and auxiliary outputs.

        With `return_loss=False` a call in training mode returns None in place of the loss.

        The arguments are those of the model, with the target behind them where there is a `loss_fn`. Tensors of
        another shape or dtype trace the model again.

        Raises CaptureError where the model cannot be traced, PlanMismatchError or PeerFailedError where the
        ranks do not agree, CollectiveError where communication fails, and VirtualWorldError in a virtual world.
        """
        if self.virtual:
            raise VirtualWorldError(
                f"this step was compiled for a virtual world (device_num={self.config.device_num}), which has no "
                "devices to run on: leave device_num out and start the program under torchrun; lower() works here"
            )
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                return self(*args, **kwargs)
        self._follow_world()
        remove_hooks_of_graphs(self.model)
        return self.session.call(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self.session.agreement is not None:
            raise NotAvailableError(
                "a compiled step of several ranks cannot be copied or pickled, as it holds their process groups: copy "
                "model and optimizer (copy.deepcopy, state_dict()), and compile a step for the copy on all ranks"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_checkpoints"}

    @user_frames_only
    def synchronize(self) -> None:
        """Wait until the last step is complete.

        With `ScheduleConfig(across_steps=True)` a call returns while gradients are still on the wire. Reading a
        parameter or the optimizer's state waits by itself. Call this for reads that the step cannot see, such
        as those of an alias (`param.data`) that was made before. Raises CollectiveError when the communication
        fails.
        """
        self.session.synchronize()

    @user_frames_only
    def close(self) -> None:
        """Complete the last step, and let go of CUDA graphs and process groups. Further calls of the step raise.

        A program that ends does the same by itself, and so does `destroy_process_group()` for the graphs. A step
        that is closed already stays so. Raises CollectiveError if updates of the last step are still to come and their
        communication fails, and the error of an asynchronous save that nobody has seen. The step is closed all the
        same.
        """
        try:
            self._checkpoints.wait()
        finally:
            self.session.close()

    @user_frames_only
    def lower_micro_batch(self, *args: Any, **kwargs: Any) -> Lowered:
        """With accumulate_steps: as `lower`, for a micro-batch that another one follows before the update.

        It adds its gradients to those of earlier ones. `lower` shows the last one, which reduces and updates.

        Raises ConfigValueError for a step that does not accumulate, and what compiling raises.
        """
        if self.config.accumulate_steps == 1:
            raise ConfigValueError(
                "lower_micro_batch() of a step with accumulate_steps=1, in which every call updates: use lower(), or "
                "compile with accumulate_steps"
            )
        self._follow_world()
        self.synchronize()
        with lock_of(self.model), outside_inference_mode(), self.session.shapes_only():
            compiled = self.planner.read_early(self.planner.read(self.planner.take_apart(args, kwargs)))
        return self._lowered(compiled, args, kwargs)

    def drop_micro_batches(self) -> None:
        """With accumulate_steps: forget the gradients of the calls since the last update. All ranks call this together.

        The next call is the first micro-batch of an update again.
        """
        self.session.micro_batches.drop()

    @property
    def steps(self) -> int:
        """How many training steps have been run, with those before a checkpoint that was loaded.

        With accumulate_steps those are the updates.
        """
        return self.session.steps

    @user_frames_only
    def state_dict(self) -> dict[str, Any]:
        """What the step needs to go on, with whole tensors by name. `load_state_dict` takes it.

        "model" is that of `model.state_dict()`, "optimizer" that of `optimizer.state_dict()` with names of parameters
        in place of their numbers, and "step" holds the number of training steps and where the seeds of a divided graph
        stand. As with these methods the tensors are those of the step, which the next call changes: copy them to keep
        them. Where parameters or optimizer states are divided among ranks, all ranks call this together, and any of
        them may then save it.

        Raises CollectiveError when updates of the last step are still to come and their communication fails, or where
        ranks do not come to read parts together.
        """
        self.synchronize()
        return StepState(self.model, self.optimizer, self.session).full()

    @user_frames_only
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned, in any world. All ranks call this together.

        Values of other types are cast, as `load_state_dict` of model and optimizer do it; states of the optimizer keep
        the types that they were saved with.

        Raises CheckpointError, which lists names and shapes, if it is the state of another model or optimizer, and
        PeerFailedError if that is so on another rank. Nothing has changed on any rank then.
        """
        self._follow_world()
        self.session.check_open()
        self.session.check_process()
        with outside_inference_mode():
            self._checkpoints.load_state_dict(state_dict)

    @user_frames_only
    def save(
        self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None, *, asynchronous: bool = False
    ) -> Saving:
        """Write a checkpoint, from which `load` goes on with the same training. All ranks call this together.

        It holds what `state_dict` gives, the generators of random numbers of each rank, the plan that
        `schedule="auto"` has found, and `extra`. Each rank writes its parts of what is divided, and about as many bytes
        of the rest as the others; nobody gathers anything. The folder appears when all ranks have written, and a
        checkpoint that was there stays until then. Its files are those of torch.distributed.checkpoint.

        folder: where to, on a file system that all ranks share.
        extra: objects with `state_dict()` and `load_state_dict()` such as a learning-rate scheduler, generators of
            torch, and plain values, by name.
        asynchronous: whether to return when all is copied, and write while the step goes on. The next save waits for
            this one, and so do `close` and the end of the program.

        Returns a `Saving`, whose `wait()` waits and raises what went wrong. The error of an asynchronous save is also
        logged, and raised by the next save or `close` if nobody has waited. Raises CheckpointError, or PeerFailedError
        where another rank has failed: nothing has been written then.
        """
        self._check_ranks("save")
        with outside_inference_mode():
            return self._checkpoints.save(folder, extra, asynchronous)

    @user_frames_only
    def load(self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Go on from a checkpoint that `save` has written. All ranks call this together.

        The world may have another size, and the model may be divided in another way. On as many ranks as before, random
        numbers, buffers and extras are those of each rank; on others all ranks go on with those of rank 0. A step that
        has divided its parameters reads its parts only.

        folder: that of `save`.
        extra: objects to give their states back, by the names that they were saved under.

        Returns the extras that nobody was given: plain values, and states of objects. Raises CheckpointError for what
        is no checkpoint, damaged, or of another model, and what `load_state_dict` of an object raises, or
        PeerFailedError where another rank has failed: nothing has changed on any rank then.
        """
        self._check_ranks("load")
        with outside_inference_mode():
            return self._checkpoints.load(folder, extra)

    def _check_ranks(self, what: str) -> None:
        if self.virtual:
            raise VirtualWorldError(f"{what}() is for real ranks: leave device_num out and start under torchrun")
        self._follow_world()
        self.session.check_open()
        self.session.check_process()

    def _begin(self, config: CompileConfig) -> None:
        if (checkpoints := self.__dict__.pop("_checkpoints", None)) is not None:
            checkpoints.finish()
        super()._begin(config)

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.model, StepState(self.model, self.optimizer, self.session), self.session)

    def retrace(self) -> None:
        """Forget all graphs, so that the next call traces the model again.

        A step cannot see changes of globals, of environment variables and of values behind closures of helper
        functions (docs/what-is-fixed.md): call this after one, on all ranks. A rank that traces another graph
        than the others ends the step with a PlanMismatchError on all of them. Parameters, optimizer state and
        buffers stay what they are.

        Raises CollectiveError when updates of the last step are still to come and their communication fails.
        """
        self.synchronize()
        self.planner.retrace()
        if self.session.replan is not None:
            self.session.replan.restart()

    @user_frames_only
    def profile(self, *args: Any, rounds: int = 5, cluster: Any = None, **kwargs: Any) -> StepProfile:
        """Measure what every compute node of this call takes on the actual ranks. All ranks call it together.

        The result is the same on every rank, and `compile` takes it as `cluster=`. Afterwards parameters,
        gradients, buffers, optimizer state and random numbers are what they were.

        args, kwargs: those of a call.
        rounds: how often the step is run; medians count.
        cluster: what collectives cost (`commfuse calibrate` measures that). None: the step's own cluster.

        Raises VirtualWorldError in a virtual world, and what a call raises.
        """
        if self.virtual:
            raise VirtualWorldError("profile() measures real ranks: leave device_num out and start under torchrun")
        self._follow_world()
        self.session.check_open()
        self.session.check_process()
        with self.session.turn():
            return self._profile(args, kwargs, rounds, cluster)

    def _profile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rounds: int, cluster: Any) -> StepProfile:
        self.synchronize()
        call = self.planner.take_apart(args, kwargs)
        executor = self.session.executor(self.session.plan(call), call)
        given = self._figures if cluster is None else resolve_costs(cluster)
        if isinstance(given, StepProfile):
            given = given.cluster
        params = dict(self.model.named_parameters())
        device = next((param.device.type for param in params.values()), "cpu")
        given = default_cluster(device, self.mesh.world) if given is None else given
        inputs = dict(call.leaves)
        measured = profile_step(executor, inputs, given, rounds, model_fingerprint(params))
        with self.session.calls_undone(executor):
            return with_overhead(
                measured, executor, inputs, lambda: self(*args, **kwargs), self.synchronize, max(rounds, 3)
            )

    @user_frames_only
    def verify(self, every: int | None) -> None:
        """Verify each step whose number (`steps`) is a multiple of `every`, from now on. All ranks call this alike.

        A step that is verified runs twice: as planned, and on copies of parameters, optimizer state, buffers, random
        numbers and batch, from the graph before fusion, scheduling and memory. Loss, parameters, states and buffers
        have to be the same, bit for bit where sums over ranks have two terms at most and Inductor and CUDA do not
        compute, else within the order of sums. What ranks hold alike is compared over ranks. Training goes on as
        without it, and `verified` has the report. If something differs, the call raises VerificationError on all ranks
        after the step, whose values stay.

        every: an int from 1 on, or None to verify none.

        Raises NotAvailableError for an optimizer whose update is not in the graph, and VirtualWorldError in a virtual
        world.
        """
        if every is not None:
            check_int(every, "every", 1)
        self._check_ranks("verify")
        if every is not None and self.optimizer is not None:
            described = describe_optimizer(self.optimizer, self.model)
            if described.rule == "opaque":
                raise NotAvailableError(why_not(described.class_name, described.why_opaque))
        self.session.verified.begin(every)

    @property
    def verified(self) -> VerifiedStep | None:
        """The report on the last step that was verified; None if none was."""
        return self.session.verified.last

    @contextmanager
    def record_communication(self) -> Iterator[Timeline]:
        """Measure the communication of the steps that run inside the `with` block, on this rank.

        The timeline tells for each collective how long it was in flight, and for how long of that the step was
        blocked. It includes the vote of the ranks, where there is one. Read it after the block: for a model on CUDA,
        where a wait blocks a stream and not the host, its times are known by then. Steps inside the block run
        without CUDA graphs.
        """
        device = next((param.device for param in self.model.parameters() if param.is_cuda), None)
        timeline = self.session.timeline = Timeline() if device is None else CudaTimeline(device)
        try:
            yield timeline
        finally:
            self.session.timeline = None
        timeline.finish()
