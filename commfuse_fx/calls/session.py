"""How a compiled step runs on this rank: turns of threads, votes of ranks, and what a step leaves to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from commfuse_fx.calls.hand_out import handed_out
from commfuse_fx.calls.micro_batches import MicroBatches
from commfuse_fx.calls.verified_steps import VerifiedSteps
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import CommFuseError, PlanMismatchError
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.cuda_graphs.cuda_graph import CudaRecorder, Recorder
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import StepGraphs
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.random_states import RandomStates
from commfuse_fx.runtime.memory.host_memory import give_freed_memory_back
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.before_destroy import before_destroy
from commfuse_fx.runtime.ranks.callers import OutOfTurn, lock_of, making_a_step
from commfuse_fx.runtime.ranks.forks import check_process, process
from commfuse_fx.runtime.ranks.group_holders import release_at_exit
from commfuse_fx.runtime.ranks.groups import Groups
from commfuse_fx.runtime.ranks.seeds import Seeds
from commfuse_fx.support.ranks import joined_size
from commfuse_fx.trials.replan import Replan
from commfuse_fx.votes import graph_runs
from commfuse_fx.votes.plans_in_common import plan_in_common
from commfuse_fx.votes.runners import Runner, Runners
from commfuse_fx.votes.together import Together, let_first
from commfuse_fx.votes.voting import Voting


class Session:
    """The state behind one compiled step on one rank. A virtual world's ranks have none of their own."""

    def __init__(self, planner: Planner, rank: int) -> None:
        self.planner = planner
        self.rank = rank
        self.timeline: Timeline | None = None
        """What measures the communication of the steps that run now."""
        self.running: Executor | None = None
        """That of the last step, which may have left something on the wire."""
        self.ran: Plan | None = None
        """The plan of the last call."""
        self.agreement: Agreement | None = None
        self.graphs: StepGraphs | None = None
        """The captured steps; None if none is ever captured."""
        self.replan: Replan | None = None
        """What tries other plans; None if the plan of a call stays."""
        self.is_closed = False
        self.steps = 0
        """Training steps so far, with those before a checkpoint that was loaded."""
        self._process = process()
        self._calls = 0
        self._undone_calls = 0  # of them, those of `profile`
        self._random: RandomStates | None = None  # before the step that runs
        config = planner.config
        is_real = config.device_num is None and config.parallel_mode != "stand_alone"
        groups = self._join(config) if is_real and max(planner.mesh.world, joined_size()) > 1 else None
        self.runners = Runners(planner, rank, groups, self.agreement, self.synchronize, lambda: self._calls)
        self.voting = Voting(planner, self.agreement)
        self.micro_batches = MicroBatches(planner)
        voted = self.runners, self.voting, self.agreement, self.micro_batches
        self.verified = VerifiedSteps(planner, *voted, self.synchronize)
        self._seeds = Seeds(rank, None if self.agreement is None else self.agreement.name)
        self.together = Together(planner, self.agreement, self.synchronize, lambda: self._is_lost)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied step makes what runs its own model."""
        return Session, (self.planner, self.rank)

    def _join(self, config: CompileConfig) -> Groups:
        device_mesh = config.mesh if hasattr(config.mesh, "mesh_dim_names") else None
        device = next((p.device.type for p in self.planner.model.parameters()), "cpu")
        with making_a_step():
            groups = Groups.of_world(self.planner.mesh, device, device_mesh)
            self.agreement = Agreement()
        release_at_exit(self)
        before_destroy(self.synchronize)
        return groups

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call of the step: its loss, or a pair of the loss and auxiliary outputs."""
        if self.is_closed:
            self.check_open()
        agreement = self.agreement
        if agreement is None:
            with lock_of(self.planner.model), self.planner.whole_call:
                self._calls += 1
                return self._run(args, kwargs)
        self.check_process()
        with agreement.callers.turn(agreement.number), self.planner.whole_call:
            self._calls += 1
            while True:
                try:
                    return self._call(agreement, args, kwargs)
                except OutOfTurn as other:
                    let_first(agreement, other.first)

    def synchronize(self) -> None:
        """Wait until the last step is complete."""
        if self.running is not None:
            self.running.synchronize()
        if self.graphs is not None:
            self.graphs.check()

    def shapes_only(self) -> AbstractContextManager[None]:
        """Parameters that are divided among ranks have memory, but no values: enough to trace the model with."""
        return self.runners.executors.shapes_only()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """No other thread runs a step of this model, nor on several ranks any step."""
        with ExitStack() as entered:
            if self.agreement is not None:
                entered.enter_context(self.agreement.callers.turn(self.agreement.number))
            entered.enter_context(lock_of(self.planner.model))
            yield

    def check_process(self) -> None:
        """Raises ForkError in a child of the process that made a step of several ranks."""
        if self.agreement is not None:
            check_process(
                self._process,
                "this step talks to other ranks, which only the parent can: call it there, or start programs of their "
                "own (torchrun) and compile a step in each",
            )

    def check_open(self) -> None:
        """Raises CommFuseError after `close`."""
        if self.is_closed:
            raise CommFuseError(
                "this step is closed: step.close() has let go of its CUDA graphs and process groups; compile another "
                "step for the same model and optimizer"
            )

    def plan(self, call: Call) -> Plan:
        """The plan for this call, traced anew where that is needed."""
        with self.shapes_only():
            return self.planner.plan(call)

    def executor(self, plan: Plan, call: Call) -> Executor:
        """The plan's executor, bound to the optimizer's present state; re-plans where that state demands it."""
        runner = self.runners.of(plan) or self.runners.make(plan, self._prepare)
        self.runners.executors.hand_over(runner.executor)
        if not runner.executor.is_bound():
            try:
                runner.executor.bind()
            except LayoutConflict as conflict:
                with self.shapes_only():
                    self.planner.replan(plan, call, conflict)
                runner = self.runners.make(plan, self._prepare)
                self.runners.executors.hand_over(runner.executor)
                runner.executor.bind()
        return runner.executor

    def _prepare(self, runner: Runner) -> None:
        """Let the runner's executor vote before its first collective. It holds the session as long as it lives: a step
        that is dropped while an update is pending still releases its process groups when the program ends."""
        config, executor = self.planner.config, runner.executor
        if self.graphs is None and config.cuda_graph is not False and executor.devices:
            self.capture_with(CudaRecorder(torch.device("cuda", executor.devices[0])))
        if self.graphs is not None:
            self.graphs.admit(executor)
        executor.prepare(
            lambda: self.voting.cast_in_step(runner), lambda: self.voting.settle_in_step(runner), runner.changes
        )

    def capture_with(self, recorder: Recorder) -> None:
        """Capture steps from now on, where that is possible. Call it before the first step."""
        self.graphs = StepGraphs(recorder, self.planner.config.cuda_graph is True, graph_runs.watch_of(self.agreement))
        release_at_exit(self)
        if self.agreement is not None:
            before_destroy(self.graphs.close)  # graphs have to go before the communicators in them

    @contextmanager
    def calls_undone(self, executor: Executor) -> Iterator[None]:
        """Calls inside the block do not count for what comes after: for seeds, for parameters that rank 0 has still to
        send, and for those that were whole."""
        calls, steps, started = self._calls, self.steps, self.voting.is_started
        shards = executor.shards
        whole = [] if shards is None or shards.is_divided else list(executor.params.values())
        kept = [param.detach().clone() for param in whole]
        try:
            with ExitStack() as paused:
                for each in (self.graphs, self.replan, self.micro_batches, self.verified):
                    if each is not None:
                        paused.enter_context(each.paused())
                yield
        finally:
            self._undone_calls += self._calls - calls
            self.steps = steps
            if self.planner.config.parameter_broadcast:  # what was sent has been undone as well
                self.voting.is_started = started
        if shards is not None and whole:
            shards.open()
            with torch.no_grad():
                for param, before in zip(whole, kept, strict=True):
                    param.copy_(before)

    @property
    def seed(self) -> int | None:
        """Where the sequence of seeds of a divided graph stands, the same on all ranks; None before its first step."""
        return self._seeds.place(self._calls - self._undone_calls)

    def go_on(self, steps: int, seed: int | None) -> None:
        """The next step comes after so many, and after the one at which `seed` was the place of the seeds."""
        self.steps = steps
        self.micro_batches.drop()
        self._seeds.go_on(seed, self._calls - self._undone_calls)

    def try_plans(self, asked: CompileConfig, preset: CompileConfig) -> None:
        """Measure steps while they train, and let the fastest plan stay. For a world of several ranks.

        asked, preset: as `Replan` takes them.
        """
        self.replan = Replan(self.planner, self.voting, asked, preset, self.rank, self._let_go)

    def _let_go(self) -> None:
        """Give back the memory that plans keep between steps. The last step is complete then."""
        self.synchronize()
        self.runners.executors.let_go()
        if self.replan is not None and self.replan.is_settled:
            give_freed_memory_back()

    def shown(self, compiled: Compiled) -> Compiled:
        """What runs in place of the default plan of a call."""
        if not compiled.program.training:
            return self.planner.read_on_parts(compiled, self.runners.executors.divided)
        return compiled if self.replan is None else self.replan.shown(compiled)

    def _call(self, agreement: Agreement, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        agreement.begin_step()
        try:
            with lock_of(self.planner.model):
                return self._run(args, kwargs)
        except BaseException as error:
            expected = self.planner.watch.trains or self.runners.some_evaluation_votes()
            agreement.leave_step(error, expected=expected and isinstance(error, Exception), lost=self._is_lost)
            raise

    @property
    def _is_lost(self) -> bool:
        """Whether updates of the last step can no longer be completed."""
        failed = self.running is not None and self.running.tail.failed
        return failed or (self.graphs is not None and self.graphs.is_lost)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = self.planner.take_apart(args, kwargs)
        agreement = self.agreement
        if agreement is None or not (self.planner.config.plans_by_cost or self.replan is not None):
            return self._run_call(call)
        self._random = None
        try:
            return self._run_call(call)
        except PlanMismatchError as error:
            if not error.may_agree:
                raise
            if self.replan is not None and self.replan.runs_another:
                self.replan.differ(error)
                agreement.begin_step()
            else:
                plan_in_common(self.planner, agreement, call, error)
        if self._random is not None:  # the same call draws the same numbers
            self._random.restore()
        return self._run_call(call)

    @property
    def _may_plan_again(self) -> bool:
        """Whether a step may find that plans differ between ranks, and run again with a plan that all ranks make."""
        return self.agreement is not None and (
            self.planner.config.plans_by_cost or (self.replan is not None and self.replan.runs_another)
        )

    def _run_call(self, call: Call) -> Any:
        if self.running is not None:
            self.running.tail.check()
        is_early = self.micro_batches.is_early
        if self.replan is not None and self.planner.watch.trains and not is_early:
            self.replan.before_step()
        plan = self._plan_that_runs(call)
        if plan is None:
            self.synchronize()
            plan = self._chosen(self.plan(call))
            self.running = self.executor(plan, call)
        if not self.voting.is_started:
            self._start(plan, call)
        executor = self.running
        assert executor is not None
        self._watch_wire(executor)
        self.micro_batches.check(executor.program)
        self.micro_batches.begin([executor.held])
        if executor.needs_seed:
            executor.seed = self._seeds.of_step(self._calls - self._undone_calls)
        if self._may_plan_again:
            self._random = RandomStates(executor.generators)
        runner, self.ran = self.runners.of(plan), plan
        assert runner is not None, "the plan's executor"
        launch = partial(self._launch, plan, runner, dict(call.leaves))
        outputs = self.verified.run(plan, call, runner, self.steps + 1, launch)
        if self.agreement is not None:
            self.agreement.end_step()
        if self.replan is not None and not is_early:
            self.replan.clock.after_step(plan, runner, is_usual=not self.verified.is_verifying)
        self.steps += self.micro_batches.done(executor.program)
        returned = handed_out(plan, executor, outputs, self.planner.config.return_loss)
        self.verified.check()
        return returned

    def _launch(self, plan: Plan, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        replan = self.replan
        if replan is not None and self.timeline is None and replan.measures(plan, runner):
            return replan.run_measured(plan, runner, partial(runner.executor.run_by, inputs=inputs))
        if self.graphs is None:
            return runner.executor.run(inputs)
        # A timeline hears of each collective, which a graph repeats without telling anybody. And a plan that is tried
        # may go soon.
        is_tried = replan is not None and not replan.is_settled
        with self.graphs.paused() if is_tried or self.timeline is not None else nullcontext():
            return graph_runs.run(self.graphs, self.voting, runner, inputs)

    def _chosen(self, plan: Plan) -> Plan:
        """The plan that runs in place of the default plan of a call."""
        if self.micro_batches.is_early:
            return self.micro_batches.plan(plan)
        if not plan.compiled.program.training:
            return self.planner.on_parts(plan, self.runners.executors.divided)
        return plan if self.replan is None else self.replan.chosen(plan)

    def _start(self, plan: Plan, call: Call) -> None:
        """Before the first step: see what parameters begin with, or let rank 0 send them."""
        runner = self.runners.of(plan)
        assert runner is not None, "the plan's executor"
        sends = self.agreement is not None and self.planner.config.parameter_broadcast
        if self.micro_batches.is_early and sends and runner.ballot is None:
            last = self.plan(call)  # that of the last micro-batch, in which the ranks vote
            self.executor(last, call)
            runner = self.runners.of(last)
            assert runner is not None, "the plan's executor"
        self.voting.start(runner)
        if runner.executor is not self.running:
            self.running = self.executor(plan, call)

    def _plan_that_runs(self, call: Call) -> Plan | None:
        """The plan of the last step, if it serves this call too and may go on while its tail is on the wire."""
        # Looks at guarded parameters, but not at their values.
        with torch._C.DisableTorchFunctionSubclass():
            plan, running = self.planner.known_plan(call), self.running
            if plan is None or running is None:
                return None
            plan = self._chosen(plan)
            runner = self.runners.of(plan)
            return plan if runner is not None and runner.executor is running and running.is_bound() else None

    def _watch_wire(self, executor: Executor) -> None:
        """Let the running timeline, if there is one, see this step's collectives."""
        executor.wire.timeline = self.timeline
        if self.agreement is not None:
            self.agreement.timeline = self.timeline
        if self.timeline is not None:
            self.timeline.begin_step()

    def close(self) -> None:
        """Complete the last step, and let go of graphs and process groups. Raises what `synchronize` raises."""
        if self.is_closed:
            return
        self.is_closed = True
        with self.turn():
            try:
                self.synchronize()
            finally:
                self.release()

    def release(self) -> None:
        """Let go of graphs and process groups, when updates of the last step are complete."""
        if self._process != process():
            return  # a forked child: the groups are its parent's
        with suppress(CommFuseError):  # nobody is left to be told
            self.synchronize()
        if self.graphs is not None:
            with suppress(RuntimeError):  # a device that has failed
                self.graphs.close()
        self.running = self.replan = self.ran = None
        self.runners.release()
        self.together.release()
        self.verified.release()
        self.voting.release()
        self.agreement = None
