"""What runs the plans of one step on this rank.

Why: docs/decisions.md, "Batches may be uneven in data_parallel".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commfuse_fx.capture.given_gradients import given_gradients
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import communication_text, gradients_text, sent_in_forward_text, sent_text
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.halves_executor import HalvesExecutor
from commfuse_fx.runtime.execute.rank_executors import RankExecutors
from commfuse_fx.runtime.execute.wire.socket_threads import let_lock_holders_run
from commfuse_fx.runtime.memory.host_memory import keep_freed_memory
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.ballots import Ballot
from commfuse_fx.runtime.ranks.exchange import Exchange, ProcessExchange
from commfuse_fx.runtime.ranks.groups import Groups


@dataclass(frozen=True)
class Runner:
    """A plan's executor.

    ballot: what ranks that run it together vote for; None where they do not vote. forward: what they vote for ahead of
    the forward of a module; None where that sends nothing.
    changes: whether several ranks that run it change parameters or reduce gradients, so that they vote even where
        nothing is sent: one that skips a batch or dies would go unnoticed.
    """

    executor: Executor
    ballot: Ballot | None
    forward: Ballot | None = None
    changes: bool = False


class Runners:
    """The runners of a step's plans, each made when its plan is first run.

    synchronize: completes the last step. calls: how many calls the step has had.
    """

    def __init__(
        self,
        planner: Planner,
        rank: int,
        groups: Groups | None,
        agreement: Agreement | None,
        synchronize: Callable[[], None],
        calls: Callable[[], int],
    ) -> None:
        self.groups = groups
        self.executors = RankExecutors(rank, self._make_exchange, synchronize)
        self._planner = planner
        self._rank = rank
        self._agreement = agreement
        self._calls = calls
        self._made: weakref.WeakKeyDictionary[Plan, Runner] = weakref.WeakKeyDictionary()
        self._exchanges = 0

    def of(self, plan: Plan) -> Runner | None:
        """What runs this plan with the parameters that the model has now, if that has been made."""
        runner = self._made.get(plan)
        return runner if runner is not None and runner.executor.params is self._planner.watch.params else None

    def make(self, plan: Plan, prepare: Callable[[Runner], None]) -> Runner:
        """In place of the plan's present runner, if it has one. prepare: lets the executor generate its code."""
        program, planner = plan.compiled.program, self._planner
        self._forget_replaced_parameters()
        groups = None if self.groups is None else self.groups.on(program.mesh)
        watch = planner.watch
        executor = self.executors.make(program, watch.params, watch.buffers, planner.optimizer, groups)
        ballot = forward = None
        changes = self._agreement is not None and _changes(plan)
        if self._agreement is not None and (executor.has_collectives or changes):
            ballot = _ballot(plan, self._agreement.number, planner, planner.config)
            executor.wire.distress = self._agreement.distress
            if isinstance(executor, HalvesExecutor) and executor.shards is not None and executor.forward_sends:
                forward = _ballot_of_forward(program, self._agreement.number, planner)
        runner = Runner(executor, ballot, forward, changes)
        prepare(runner)
        if executor.has_collectives:
            let_lock_holders_run()
        if any(param.is_cpu for param in executor.params.values()):
            keep_freed_memory()
        self._made[plan] = runner
        return runner

    def some_evaluation_votes(self) -> bool:
        """Whether an evaluation has been run whose forward has collectives."""
        return any(
            runner.ballot is not None and not plan.compiled.program.training
            for plan in self._planner.plans.values()
            if (runner := self._made.get(plan)) is not None
        )

    def release(self) -> None:
        """Let go of everything that holds process groups."""
        self._made.clear()
        self._planner.plans.clear()
        self.executors.release()
        self.groups = self._agreement = None

    def _forget_replaced_parameters(self) -> None:
        """Let go of what has run with parameters that are no longer the model's; it would keep their memory."""
        for plan in self._planner.plans.values():
            if plan in self._made and self.of(plan) is None:
                del self._made[plan]

    def _make_exchange(self, mesh: Mesh, _: Any) -> Exchange:
        assert self._agreement is not None, "a world of several ranks"
        self._exchanges += 1
        name = f"{self._agreement.name}/{self._exchanges}"
        return ProcessExchange(mesh, self._rank, name, self._calls, self._agreement.distress)


def _changes(plan: Plan) -> bool:
    """Whether a call of this plan updates, or hands out gradients that are reduced."""
    compiled = plan.compiled
    return compiled.asked.gradients != "local" and (compiled.program.training or compiled.program.has_two_halves)


def _ballot(plan: Plan, number: int, planner: Planner, config: CompileConfig) -> Ballot:
    if plan.compiled.program.has_two_halves:
        return ballot_of_module(plan.compiled.program, number, planner)
    if planner.form == "update":
        return _ballot_of_update(plan.compiled.program, number, planner)
    if plan.compiled.program.params_of_each_rank:  # of any shape, so what ranks compute is each one's own here as well
        return ballot_of_module(plan.compiled.program, number, planner)
    texts = plan.compiled.voted
    assert texts is not None, "a step of several ranks"
    is_training = plan.compiled.program.training
    return Ballot(
        number,
        type(planner.model).__qualname__,
        *texts,
        communication_text(plan.compiled.program),
        plan.config is None and (planner.has_common_plan or not config.plans_by_cost),
        between_steps="" if is_training else "an evaluation",
    )


def _ballot_of_update(program: Program, number: int, planner: Planner) -> Ballot:
    own = program.params_of_each_rank
    specs = {
        name: "layerwise_parallel" if name in own else program.params[name].spec for name in given_gradients(program)
    }
    text = "".join(f"gradient of {name}: {spec}\n" for name, spec in specs.items())
    plan = sent_text(program) if own else communication_text(program)
    return Ballot(number, type(planner.model).__qualname__, text, text, plan, True, is_module=True)


def ballot_of_module(program: Program, number: int, planner: Planner) -> Ballot:
    """Ranks of a module have to send the same; what they compute is each one's own."""
    text = gradients_text(program)
    return Ballot(number, type(planner.model).__qualname__, text, text, sent_text(program), True, is_module=True)


def _ballot_of_forward(program: Program, number: int, planner: Planner) -> Ballot:
    """Where parameters are divided, ranks gather them in their forwards."""
    lines = [f"use of {name}: {param.spec}" for name, param in program.params.items() if _is_read(program, name)]
    text, plan = "\n".join(lines) + "\n", "forward\n" + sent_in_forward_text(program)
    model, what = type(planner.model).__qualname__, "a forward" if program.training else "an evaluation"
    return Ballot(number, model, text, text, plan, True, is_module=True, between_steps=what)


def _is_read(program: Program, name: str) -> bool:
    node = program.placeholder("parameter", name)
    return program.params[name].rows_alone and node is not None and bool(node.users)
