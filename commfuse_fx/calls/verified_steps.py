"""Steps that are replayed from the graph before fusion, and compared with their replays.

Why: docs/decisions.md, "A step is verified by its replay on the same ranks, not on one device".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.calls.compared_values import ComparedValues, held_alike
from commfuse_fx.calls.micro_batches import MicroBatches
from commfuse_fx.calls.verified_step import StepDifference, VerifiedStep
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.errors import NotAvailableError, VerificationError
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.replayed_step import ReplayedStep
from commfuse_fx.runtime.memory.value_checksum import value_checksum
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.support.logs import logger
from commfuse_fx.support.long_lists import shortened
from commfuse_fx.votes.runners import Runner, Runners
from commfuse_fx.votes.voting import Voting

log = logger("runtime")

_MOST_NAMED = 8
"""Differences that an error lists."""


class VerifiedSteps:
    """Runs the steps of a session, and verifies those whose number is a multiple of `every`; None: none of them.

    finish: completes the last step.
    """

    def __init__(
        self,
        planner: Planner,
        runners: Runners,
        voting: Voting,
        agreement: Agreement | None,
        micro_batches: MicroBatches,
        finish: Callable[[], None],
    ) -> None:
        self.every: int | None = None
        self.last: VerifiedStep | None = None
        """The report on the last step that was verified."""
        self.is_verifying = False
        """Whether the last call was verified."""
        self._planner, self._runners, self._voting, self._agreement = planner, runners, voting, agreement
        self._micro_batches, self._finish = micro_batches, finish
        self._programs: weakref.WeakKeyDictionary[Plan, tuple[Compiled, Program]] = weakref.WeakKeyDictionary()
        self._found: list[StepDifference] = []  # in the micro-batches of this step, on this rank
        self._seconds, self._compared = 0.0, 0
        self._is_wrong = False

    def begin(self, every: int | None) -> None:
        """From now on, verify steps as often as this."""
        self.every = every
        self._planner.keeps_captured |= every is not None

    def release(self) -> None:
        """Let go of graphs and of the process group."""
        self.every = self._agreement = None
        self._programs.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of the block no step is verified."""
        every, self.every = self.every, None
        try:
            yield
        finally:
            self.every = every

    def run(
        self, plan: Plan, call: Call, runner: Runner, number: int, launch: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """What `launch` returns, which runs a call of step `number`, counted from 1."""
        is_due = self.every is not None and number % self.every == 0
        self.is_verifying = is_due and plan.compiled.program.training
        return self._run(plan, call, runner, number, launch) if self.is_verifying else launch()

    def _run(
        self, plan: Plan, call: Call, runner: Runner, number: int, launch: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """What can fail on one rank alone comes before the ranks vote."""
        began = perf_counter()
        self._finish()
        if self._micro_batches.count == 0:
            self._found, self._seconds, self._compared = [], 0.0, 0
        executor, program = runner.executor, self._program(plan, call)
        groups = None if self._runners.groups is None else self._runners.groups.on(program.mesh)
        replay = ReplayedStep(executor, program, dict(call.leaves), groups)
        self._seconds += perf_counter() - began
        with self._voting.verifying(self.every or 0):
            outputs = launch()
        self._finish()
        began = perf_counter()
        pairs = list(replay.pairs(outputs))
        compared = ComparedValues(plan.compiled, program, executor)
        rank = executor.rank
        for pair, each in compared.differences(pairs):
            carried = _carrier(plan.compiled.program, pair.name)
            parameter = pair.name if pair.name in executor.params else ""
            self._found.append(
                StepDifference(
                    str(pair), parameter, (rank,), rank, each.index, each.found, each.replayed, carried_by=carried
                )
            )
        self._compared += len(pairs)
        if self._micro_batches.is_early:
            self._seconds += perf_counter() - began
            return outputs
        found, count = self._of_all_ranks(runner)
        self._seconds += perf_counter() - began
        self.last = VerifiedStep(
            number,
            compared.bitwise,
            self._compared,
            count,
            self._seconds,
            replay.nbytes,
            peak_memory(program),
            tuple(found),
        )
        self._is_wrong = bool(found)
        log.info("verified %s", self.last.text())
        return outputs

    def check(self) -> None:
        """After a step that is complete. Raises VerificationError, on all ranks alike, if it is wrong."""
        if not self._is_wrong:
            return
        self._is_wrong = False
        assert self.last is not None
        lines = shortened([f"  {each}" for each in self.last.differences], _MOST_NAMED, "  and {} more")
        raise VerificationError(
            f"step {self.last.step} does not have the values of its replay from the graph before fusion:\n"
            + "\n".join(lines)
            + "\nThe step is done, and its values stay: go on with them, or load a checkpoint. If it happens again at "
            "other steps only, a device or its memory is at fault; if it happens at every step, the plan is: compile "
            "with comm_fusion={'openstate': False} and schedule='none', and report it"
        )

    def _program(self, plan: Plan, call: Call) -> Program:
        known = self._programs.get(plan)
        if known is None or known[0] is not plan.compiled:
            if plan.compiled.program.optimizer is not None and plan.compiled.program.optimizer.rule == "opaque":
                raise NotAvailableError(why_not(plan.compiled.program.optimizer.class_name, plan.opaque))
            known = self._programs[plan] = plan.compiled, self._planner.read_before_fusion(plan, call)
        return known[1]

    def _of_all_ranks(self, runner: Runner) -> tuple[list[StepDifference], int]:
        """The differences of all ranks, where they vote, and how many tensors were compared over ranks."""
        if self._agreement is None or runner.ballot is None:
            return sorted(self._found, key=lambda each: -each.size), 0
        alike = {} if self._voting.starts_differ else self._checksums(runner)
        everybody = self._agreement.from_all((self._found, alike), left="The step itself is complete on this rank")
        merged: dict[str, StepDifference] = {}
        for found, _ in everybody:
            for each in found:
                known = merged.get(each.what, each)
                largest = each if each.size > known.size else known
                ranks = tuple(dict.fromkeys((*known.ranks, *each.ranks)))
                merged[each.what] = replace(largest, ranks=ranks)
        labels = dict.fromkeys(label for _, sums in everybody for label in sums)
        count = 0
        for label in labels:
            holders = [(rank, sums[label]) for rank, (_, sums) in enumerate(everybody) if label in sums]
            count += len(holders) > 1
            others = tuple(rank for rank, bits in holders if bits != holders[0][1])
            if others:
                what, parameter = label
                merged[f"{what} over ranks"] = StepDifference(what, parameter, others, others[0], between_ranks=True)
        return sorted(merged.values(), key=lambda each: -each.size), count

    def _checksums(self, runner: Runner) -> Mapping[tuple[str, str], int]:
        executor = runner.executor
        with torch._C.DisableTorchFunctionSubclass():
            held = held_alike(executor, executor.shards)
            return {(label, name): value_checksum([value]) for label, name, value in held}


def why_not(optimizer: str, why: str) -> str:
    """The text of an error for an optimizer whose update is not in the graph. why: it is not."""
    because = f", as {why}" if why else ""
    return (
        f"step.verify() replays the update from the graph, and that of {optimizer} is its own Python code{because}: "
        "use one of torch.optim's elementwise optimizers, or turn verifying off with step.verify(every=None)"
    )


def _carrier(program: Program, name: str) -> str:
    """The collective of a plan that brings the gradient of a parameter, or the parameter itself."""
    carriers = [node for node in program.collectives() if name in collective_of(node).members]
    return info(carriers[0]).name if carriers else ""
