"""What runs the plans of one step on this rank, and what its programs share: memory, parts of parameters, groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import communication_text
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.socket_threads import let_lock_holders_run
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.host_memory import keep_freed_memory
from commfuse_fx.runtime.memory.layout import divided_parameters
from commfuse_fx.runtime.memory.shards import Shards, layouts_of
from commfuse_fx.runtime.ranks.agreement import Agreement, Ballot
from commfuse_fx.runtime.ranks.exchange import Exchange, ProcessExchange
from commfuse_fx.runtime.ranks.groups import Groups


@dataclass(frozen=True)
class Runner:
    """A plan's executor. ballot: what ranks that run it together vote for; None where nothing is sent."""

    executor: Executor
    ballot: Ballot | None


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
        self.shards: Shards | None = None
        """Those of the last step, whose parameters may be divided."""
        self._planner = planner
        self._rank = rank
        self._agreement = agreement
        self._synchronize = synchronize
        self._calls = calls
        self._pool = FlatPool()
        self._made: weakref.WeakKeyDictionary[Plan, Runner] = weakref.WeakKeyDictionary()
        self._known_shards: dict[Any, Shards] = {}
        self._exchanges = 0

    def of(self, plan: Plan) -> Runner | None:
        """What runs this plan with the parameters that the model has now, if that has been made."""
        runner = self._made.get(plan)
        return runner if runner is not None and runner.executor.params is self._planner.watch.params else None

    def make(self, plan: Plan, prepare: Callable[[Runner], None]) -> Runner:
        """In place of the plan's present runner, if it has one. prepare: lets the executor generate its code."""
        program, planner = plan.compiled.program, self._planner
        self._forget_replaced_parameters()
        executor = Executor(
            program,
            planner.watch.params,
            planner.watch.buffers,
            planner.optimizer,
            None if self.groups is None else self.groups.on(program.mesh),
            self._rank,
            self._pool,
            self._shards_of(program),
        )
        ballot = None
        if self._agreement is not None and executor.has_collectives:
            ballot = _ballot(plan, self._agreement.number, planner, planner.config)
            executor.wire.distress = self._agreement.distress
        runner = Runner(executor, ballot)
        prepare(runner)
        if executor.has_collectives:
            let_lock_holders_run()
        if any(param.is_cpu for param in executor.params.values()):
            keep_freed_memory()
        self._made[plan] = runner
        return runner

    def hand_over(self, executor: Executor) -> None:
        """Parameters that the next program divides in another way, or not at all, have to be whole before it."""
        if self.shards is not None and self.shards is not executor.shards:
            self.shards.open()
        self.shards = executor.shards

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
        for shards in self._known_shards.values():
            shards.exchange.release()
        self.groups = self._agreement = None

    def _forget_replaced_parameters(self) -> None:
        """Let go of what has run with parameters that are no longer the model's; it would keep their memory."""
        for plan in self._planner.plans.values():
            if plan in self._made and self.of(plan) is None:
                del self._made[plan]

    def _shards_of(self, program: Program) -> Shards | None:
        """The same ones for all programs that divide the same parameters alike."""
        optimizer, params = self._planner.optimizer, self._planner.watch.params
        if optimizer is None or not divided_parameters(program):
            return None
        key = layouts_of(program)
        known = self._known_shards.get(key)
        if known is None or known.params is not params:
            exchange = self._make_exchange(program.mesh)
            known = Shards(program, params, optimizer, self._rank, exchange, self._synchronize)
            self._known_shards[key] = known
        return known

    def _make_exchange(self, mesh: Mesh) -> Exchange:
        assert self._agreement is not None, "a world of several ranks"
        self._exchanges += 1
        return ProcessExchange(mesh, self._rank, f"{self._agreement.name}/{self._exchanges}", self._calls)


def _ballot(plan: Plan, number: int, planner: Planner, config: CompileConfig) -> Ballot:
    texts = plan.compiled.voted
    assert texts is not None, "a step of several ranks"
    return Ballot(
        number,
        type(planner.model).__qualname__,
        *texts,
        communication_text(plan.compiled.program),
        planner.has_common_plan or not config.plans_by_cost,
    )
