"""How a compiled module runs on this rank: forwards, and backwards that the caller's autograd starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.calls.session import Session
from commfuse_fx.capture.build import check_parameters
from commfuse_fx.capture.outputs.absent_gradients import refuse_zeros
from commfuse_fx.capture.trace.meta_tensors import check_memory
from commfuse_fx.config.parallel_optimizer import PARAMETERS
from commfuse_fx.errors import CaptureError, PlanMismatchError
from commfuse_fx.gradients.gradient_parts import GradientParts
from commfuse_fx.gradients.kept_forward import (
    Forward,
    Versions,
    divided_read_late,
    guarded,
    read_late,
    values_of,
)
from commfuse_fx.gradients.uneven_batches import UnevenBatches, is_known, note_known
from commfuse_fx.ir.core.halves import USED
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor, NamedGradients
from commfuse_fx.runtime.memory.modes import outside_inference_mode
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.runtime.ranks.ballots import Ballot, Vote
from commfuse_fx.runtime.ranks.callers import OutOfTurn, lock_of
from commfuse_fx.runtime.ranks.start_values import send_start_values
from commfuse_fx.support.logs import logger
from commfuse_fx.votes.prices_of_one_rank import PricesOfOneRank
from commfuse_fx.votes.runners import Runner

_RUNTIME = logger("runtime")


class ModuleSession(Session):
    """The state behind one compiled module on one rank.

    uneven: which ranks still have batches; None on one device.
    parts: what of gradients has been reduced.
    """

    def __init__(self, planner: Planner, rank: int) -> None:
        super().__init__(planner, rank)
        self.uneven: UnevenBatches | None = None
        self._prices: PricesOfOneRank | None = None
        if self.agreement is not None:
            self.uneven = UnevenBatches(self.agreement, lambda: self.device, self.step_of_ranks)
            self._prices = PricesOfOneRank(planner, self.uneven, rank)
        self.parts = GradientParts(sums=self.agreement is not None and not planner.config.gradients_mean)
        asked = None if self.agreement is None else planner.config.parallel_optimizer
        self.divides = asked is not None
        """Whether ranks hold rows of gradients."""
        self.gathers = asked is not None and asked.level == PARAMETERS
        """Whether they keep rows of parameters alone, too, so that forwards communicate."""
        self.knows_rows = False
        """Whether a forward has found out which parameters are divided. There may be none."""
        self._evaluates_whole = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleSession, (self.planner, self.rank)

    @property
    def params(self) -> Mapping[str, torch.nn.Parameter]:
        """The user's parameters, by name."""
        return self.planner.watch.params

    def send_start_values(self) -> None:
        """Compare what parameters there are, and let all ranks begin with rank 0's parameters and buffers.

        Raises CaptureError where a parameter cannot be traced or has no memory.
        """
        if self.agreement is None:
            return
        check_parameters(self.planner.model)
        check_memory(self.planner.model, ())
        config = self.planner.config
        send_start_values(self.planner.model, self.agreement, config.parameter_broadcast, config.parallel_mode)
        if config.parameter_broadcast:
            self.voting.is_started = True

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((param.device for param in self.planner.model.parameters()), torch.device("cpu"))

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], syncs: bool) -> Forward:
        """Run the compiled forward. syncs: whether its backward is to reduce: other ranks will wait for this one.

        Raises what compiling raises, and what the model does.
        """
        try:
            return self._forward(args, kwargs)
        except Exception as error:
            if syncs or self.gathers:
                self.tell(error)
            raise

    def gathers_for_evaluation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether an evaluation runs as a compiled forward that gathers each parameter for its use.

        It does while parameters are divided. A model that cannot be traced is evaluated as it is, which makes them
        whole. Raises what the model does.
        """
        shards = self.runners.executors.shards
        if not self.gathers or shards is None or not shards.is_divided or self._evaluates_whole:
            return False
        try:
            with outside_inference_mode():
                self.compile(args, kwargs)
        except CaptureError as error:
            self._evaluates_whole = True
            _RUNTIME.warning(
                "evaluations of %s make all parameters whole, as they cannot be one graph: %s",
                type(self.planner.model).__qualname__,
                error,
            )
        except Exception as error:
            self.tell(error)
            raise
        return not self._evaluates_whole

    def tell(self, error: Exception) -> None:
        """Tell the other ranks, which will wait for this one in their backward, that its forward has failed."""
        if self.agreement is None or is_known(error):
            return
        with self.agreement.callers.turn(self.agreement.number):
            self.agreement.begin_step()
            self.agreement.leave_step(error, expected=True)
        self._told(error)

    def _told(self, error: BaseException) -> None:
        note_known(error)
        if self.uneven is not None:
            self.uneven.owes = False

    def compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the plan of a call. Raises what compiling raises; the other ranks are not told."""
        with lock_of(self.planner.model):
            self._compiled(self.planner.take_apart(args, kwargs))

    def _compiled(self, call: Call) -> Plan:
        if not self.divides:
            return self._planned(call)
        with torch._C.DisableTorchFunctionSubclass():  # looks at guarded parameters, but not at their values
            plan = self.planner.known_plan(call)
        if plan is None:
            with self.shapes_only():
                plan = self._planned(call)
        return plan

    def _planned(self, call: Call) -> Plan:
        if self._prices is not None and self.planner.plans_by_cost:
            self._prices.plan_in_common(call)
        return self.planner.plan(call)

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        with lock_of(self.planner.model), self.planner.whole_call:
            call = self.planner.take_apart(args, kwargs)
            plan = self._compiled(call)
            executor = self._executor_of(plan)
            gathers = self.gathers and executor.forward_sends
            self.knows_rows = True
            if not gathers:
                if self.divides:
                    self.hold_rows(executor.shards)
                outputs, saved = executor.forward(dict(call.leaves))
        if gathers:
            with self.step_of_ranks():
                outputs, saved = self._forward_of_ranks(plan, executor, dict(call.leaves))
        assert plan.compiled.outputs is not None
        outputs = guarded(outputs, plan.compiled.outputs.differentiable)
        described, leaves = plan.compiled.outputs, dict(call.leaves)
        divided = divided_read_late(described, executor)
        versions = Versions(read_late(described, executor, leaves, outputs), executor.shards, divided)
        inputs = {path: tensor for path, tensor in call.leaves if tensor.requires_grad}
        return Forward(plan, outputs, plan.compiled.outputs, inputs, executor.saved, list(saved), versions)

    def _forward_of_ranks(
        self, plan: Plan, executor: HalvesExecutor, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Of parameters that are divided: ranks vote, let go of whole ones, and gather each where it is used."""
        runner = self.runners.of(plan)
        assert runner is not None, "it has been made"
        if not self.voting.is_started:
            self.voting.start(runner)
        self.hold_rows(executor.shards)
        self.voting.agree_on_forward(runner)
        self._watch_wire(executor)
        return executor.forward(inputs)

    def hold_rows(self, shards: Shards | None) -> None:
        """From now on parameters and gradients are divided like this. What the user has written is taken over."""
        self.runners.executors.divide_by(shards)
        self.parts.rows = gradients = None if shards is None else shards.gradients
        if shards is not None:
            shards.take()
        if gradients is not None:
            gradients.drop_replaced(self.params)

    def shards_of(self, program: Program) -> Shards:
        """What divides parameters as this program does, which is that of their update."""
        self.planner.watch.look()
        found = self.runners.executors.shards_of(program, self.params, None)
        assert found is not None, "it divides some"
        return found

    @property
    def ranks_with_same_rows(self) -> int:
        """How many ranks hold the same rows of gradients."""
        shards = self.runners.executors.shards
        return 1 if shards is None else shards.mesh.world // shards.mesh.size(shards.group_of_rows)

    def combine_over_ranks(self, value: torch.Tensor, op: Any, what: str) -> None:
        """Combine numbers that all ranks have, in place. All of them call this together, and vote on it first.

        what: they do, with its arguments. Raises what the vote raises, and CollectiveError.
        """
        agreement, groups = self.agreement, self.runners.groups
        assert agreement is not None and groups is not None, "several ranks"
        name = type(self.planner.model).__qualname__
        ballot = Ballot(agreement.number, name, "", "", what, in_common=True, is_module=True, between_steps=what)
        with self.step_of_ranks():
            agreement.cast(Vote(ballot.signature))
            agreement.settle(ballot)
            with agreement.outside_of_steps(what) as heed:
                heed(dist.all_reduce(value, op, group=groups[groups.mesh.all_axes], async_op=True)).wait()

    def backward(
        self, forward: Forward, gradients: tuple[torch.Tensor | None, ...], mode: str, keep: bool
    ) -> NamedGradients:
        """Run the backward of a forward: gradients of parameters and of inputs.

        mode: what becomes of the gradients, as in `Situation`. keep: whether the backward may run again.

        Raises PlanMismatchError, PeerFailedError or CollectiveError as a step does.
        """
        if self.uneven is None or (mode == "local" and not self.gathers):
            with lock_of(self.planner.model):
                return self._backward(forward, gradients, mode, keep)
        self.uneven.check()
        with self.step_of_ranks():
            if self.replan is not None:
                self.replan.clock.is_paused = self.uneven.roll is not None  # where ranks may be without batches
                self.replan.before_step()
            return self._backward(forward, gradients, mode, keep)

    @contextmanager
    def step_of_ranks(self) -> Iterator[None]:
        """What the ranks do together, from a vote to what they have voted for. Raises what leads to an error there."""
        self.check_process()
        assert self.agreement is not None, "several ranks"
        with self.agreement.callers.turn(self.agreement.number), self._voted():
            yield

    def _prepare(self, runner: Runner) -> None:
        runner.executor.prepare(partial(self.voting.cast, runner), partial(self._settle, runner), runner.changes)

    def _settle(self, runner: Runner) -> None:
        self.voting.settle(runner)
        if self.uneven is not None and self.uneven.are_absent:
            assert runner.ballot is not None, "it was voted on"
            self.uneven.tell(runner.ballot.signature, runner.executor.program)

    @contextmanager
    def _voted(self) -> Iterator[None]:
        """A backward that sends is one step of the ranks."""
        agreement = self.agreement
        assert agreement is not None
        self._calls += 1
        agreement.begin_step()
        try:
            with lock_of(self.planner.model):
                yield
        except OutOfTurn as other:
            error = PlanMismatchError(
                f"rank 0 runs compiled module {other.first}, counted in the order in which they were compiled, and "
                f"this rank module {agreement.number}: run backwards, and forwards of modules that divide their "
                "parameters, in the same order on all ranks"
            )
            self._told(error)
            raise error from None
        except BaseException as error:
            agreement.leave_step(error, expected=isinstance(error, Exception))
            self._told(error)
            raise
        agreement.end_step()

    def _backward(
        self, forward: Forward, gradients: tuple[torch.Tensor | None, ...], mode: str, keep: bool
    ) -> NamedGradients:
        values = values_of(forward)
        forward.versions.check()
        differentiable = forward.described.differentiable
        absent = tuple(i for i, grad in enumerate(gradients) if grad is None and differentiable[i])
        plan, executor, places = self._taking(forward, mode, absent)
        self._about_to_run(plan, executor, mode)
        self.ran = plan
        taken = [values[place] for place in places]
        if not keep:
            forward.values = None
            forward.versions.forget()
            del values  # the executor lets go of each when it has been used
        held: dict[str, torch.Tensor | None] = {}
        if mode == "accumulated":
            with torch._C.DisableTorchFunctionSubclass():
                held = self.parts.unreduced(executor.params)
            if self.planner.config.find_unused_parameters:
                held[USED] = self._reached_before(plan.compiled.program)
        grads, of_inputs = self._run_backward(forward, plan, mode, taken, gradients, held)
        self._to_mean_of_active(grads, mode)
        return grads, of_inputs

    def _run_backward(
        self,
        forward: Forward,
        plan: Plan,
        mode: str,
        taken: list[Any],
        gradients: tuple[torch.Tensor | None, ...],
        held: Mapping[str, torch.Tensor | None],
    ) -> NamedGradients:
        replan, runner, executor = self.replan, self.runners.of(plan), self._executor_of(plan)
        if replan is None or mode == "local" or runner is None:
            return executor.backward(taken, gradients, held)
        if self.timeline is None and replan.measures(forward.plan, runner):
            run = partial(executor.backward_by, saved=taken, gradients=gradients, held=held)
            found = replan.run_measured(forward.plan, runner, run)
        else:
            found = executor.backward(taken, gradients, held)
        replan.clock.after_step(forward.plan, runner)
        return found

    def _about_to_run(self, plan: Plan, executor: HalvesExecutor, mode: str) -> None:
        """Agree on first values where that has still to be done, and let the wire know who looks on and who sends."""
        runner = self.runners.of(plan)
        if mode != "local" and not self.voting.is_started and runner is not None:
            self.voting.start(runner)
        self._watch_wire(executor)
        executor.wire.buffers_from = None if self.uneven is None else self.uneven.source

    def _to_mean_of_active(self, grads: Mapping[str, torch.Tensor], mode: str) -> None:
        """Where only ranks that still have batches count, make means over all ranks means over those, in place."""
        scale = 1.0 if self.uneven is None or mode == "local" else self.uneven.scale
        if scale != 1.0:
            for grad in grads.values():
                grad.mul_(scale)

    def _reached_before(self, program: Program) -> torch.Tensor:
        """Parameters whose gradients have not been reduced since a backward has reached them."""
        params = self.planner.watch.params
        names = [name for name, param in program.params.items() if param.trainable]
        counts = [name in self.parts.local and params[name].grad is not None for name in names]
        return torch.tensor(counts, dtype=torch.int32, device=self.device)

    def _taking(self, forward: Forward, mode: str, absent: tuple[int, ...]) -> tuple[Plan, HalvesExecutor, list[int]]:
        """What runs this backward, and where among the saved values are those that it takes."""
        plan = self.plan_of(forward.plan, mode, absent)
        executor = self._executor_of(plan)
        places = executor.places_in(forward.names)
        if places is None:
            # Passes have arranged the whole otherwise for the outputs that are left. Zeros are right as well.
            assert absent, "the passes before gradients are reduced do not know what becomes of them"
            refuse_zeros(forward.described.functions, absent)
            return self._taking(forward, mode, ())
        return plan, executor, places

    def plan_of(self, plan: Plan, mode: str, absent: tuple[int, ...]) -> Plan:
        """The plan of a backward. mode: as in `backward`. absent: which outputs have no gradient."""
        if mode != "local":
            plan = self._chosen(plan)
        if mode == "reduced" and not absent:
            return plan
        if (mode, absent) not in plan.others:
            config, common = plan.config, plan.common
            compiled = self.planner.other_backward(plan.compiled, mode, absent, config, common)
            plan.others[mode, absent] = Plan(compiled, plan.signature, plan.guards, config=config, common=common)
        return plan.others[mode, absent]

    def _executor_of(self, plan: Plan) -> HalvesExecutor:
        runner = self.runners.of(plan) or self.runners.make(plan, self._prepare)
        executor = runner.executor
        assert isinstance(executor, HalvesExecutor)
        return executor
