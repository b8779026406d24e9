"""Run all ranks of a virtual world in this process: to debug a compiled step, and to check it against one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.hand_out import hand_out
from commfuse_fx.calls.micro_batches import MicroBatches
from commfuse_fx.capture.guards.differences import cause
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.rank_executors import RankExecutors
from commfuse_fx.runtime.memory.guard import Guard
from commfuse_fx.runtime.memory.modes import outside_inference_mode, outside_modes
from commfuse_fx.runtime.ranks.exchange import Exchange, LocalExchange
from commfuse_fx.runtime.ranks.seeds import Seeds
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.virtual.rank_copies import copy_for_rank
from commfuse_fx.virtual.ranks_program import Observer, RanksProgram


@dataclass(frozen=True)
class RankResult:
    """The result of one rank's step.

    loss: the rank's own loss, a scalar.
    grads: the synchronised gradients of this step, by parameter name. Empty for a step with an optimizer.
    """

    loss: torch.Tensor
    grads: Mapping[str, torch.Tensor]


class LockstepWorld:
    """All ranks of a compiled step in this process. `world(batches)` runs one step of all ranks.

    models, optimizers: one per rank, as each process of a real world would have them. They are copies of the values at
        construction. Rank 0 has the step's own model and optimizer, unless `own_model` is False.

    Attach a learning-rate scheduler to each optimizer. Reading a divided parameter gathers the parts of all ranks. If
    you replace modules or parameters, do so in the step's own model too, because tracing looks at that one. What its
    forward sets in attributes is set there, if rank 0 has that model, and nowhere else.

    With `ScheduleConfig(across_steps=True)` a step leaves updates to the following one, as on devices. Reading a
    parameter or an optimizer state of any rank finishes them, and so does `synchronize`.
    """

    def __init__(self, step: CompiledStep, own_model: bool = True) -> None:
        self.step = step
        ranks = [(step.model, step.optimizer)] if own_model else []
        while len(ranks) < step.mesh.world:
            ranks.append(copy_for_rank(step.model, step.optimizer))
        self._whole_call: AbstractContextManager[None] = step.planner.whole_call if own_model else nullcontext()
        self.models: list[nn.Module] = [model for model, _ in ranks]
        self.optimizers: list[torch.optim.Optimizer | None] = [optimizer for _, optimizer in ranks]
        self._ranks = [RankExecutors(rank, self._exchange(rank), self.synchronize) for rank in range(len(ranks))]
        self._made: weakref.WeakKeyDictionary[Plan, RanksProgram] = weakref.WeakKeyDictionary()
        self._running: RanksProgram | None = None  # the program of the last step, which may have left updates
        self._params: Mapping[str, nn.Parameter] = {}  # of the step's model, at the last step
        self._params_of: list[dict[str, nn.Parameter]] = []  # the parameters of each rank's model, at the last step
        self._micro_batches = MicroBatches(step.planner)
        self._seeds = Seeds(0, None)
        self._steps = 0
        self._guard = Guard(self.synchronize)

    @user_frames_only
    def __call__(
        self, batches: Sequence[tuple[Any, ...]], *, drop: Collection[str] = (), observe: Observer | None = None
    ) -> list[RankResult]:
        """Run one step of all ranks; returns their results by rank.

        batches: for each rank the arguments of its call. With full_batch they are the same for all ranks.
        drop: names of collectives to leave out, to see that results then differ from those of a correct step.
        observe: is called with every node and the ranks' values.

        Raises ConfigValueError if batches differ in structure or shapes, or if their number is not the world's.
        """
        if len(batches) != len(self.models):
            raise ConfigValueError(f"{len(batches)} batches for {len(self.models)} ranks: give one per rank")
        return self.run(self._calls(batches), drop=drop, observe=observe)

    def run(
        self, calls: Sequence[Call], *, drop: Collection[str] = (), observe: Observer | None = None
    ) -> list[RankResult]:
        """The same as a call, with arguments that are flattened already."""
        with outside_inference_mode(), self._whole_call:
            return self._run(calls, drop, observe)

    def _run(self, calls: Sequence[Call], drop: Collection[str], observe: Observer | None) -> list[RankResult]:
        running = self._running = self._runner(calls[0])
        running.observe = observe
        micro_batches = self._micro_batches
        micro_batches.check(running.program)
        micro_batches.begin([rank.held for rank in self._ranks])
        if micro_batches.is_early:  # a micro-batch sends no gradients
            drop = [name for name in drop if name in running.starts]
        self._steps += 1
        for executor in running.executors:
            if executor.needs_seed:
                executor.seed = self._seeds.of_step(self._steps)
            if executor.shards is not None:
                executor.shards.release()
        try:
            outputs = running.step([dict(call.leaves) for call in calls], drop)
        except BaseException:
            self.synchronize()
            raise
        micro_batches.done(running.program)
        results: list[RankResult] = []
        # This handles guarded parameters without reading their values.
        with torch._C.DisableTorchFunctionSubclass():
            for executor, (loss, *others) in zip(running.executors, outputs, strict=True):
                executor.publish()
                grads = others[: len(running.program.grads)]
                hand_out(executor, grads)
                results.append(RankResult(loss, dict(zip(running.program.grads, grads, strict=True))))
            if running.is_pending and not self._guard.is_closed:
                self._guard.close(tensor for each in running.executors for tensor in each.storage.tensors())
        return results

    @user_frames_only
    def synchronize(self) -> None:
        """Finish the updates that the last step has left to the following one."""
        with self._guard.lock:
            try:
                if self._running is not None:
                    with outside_modes():
                        self._running.finish()
            finally:
                self._guard.open()

    @property
    def is_pending(self) -> bool:
        """Whether updates of the last step are still to come."""
        return self._running is not None and self._running.is_pending

    @user_frames_only
    def collectives(self, batch: tuple[Any, ...]) -> list[str]:
        """Names of the collectives of a call with these arguments, in issue order: what `drop` takes."""
        self.synchronize()
        program = self._plan(self.step.planner.take_apart(batch, {})).compiled.program
        return [info(node).name for node in program.collectives()]

    def _calls(self, batches: Sequence[tuple[Any, ...]]) -> list[Call]:
        """Flatten the ranks' arguments. Raises ConfigValueError if they differ in structure or shapes."""
        with torch._C.DisableTorchFunctionSubclass():
            calls = [self.step.planner.take_apart(batch, {}) for batch in batches]
            signatures = [self.step.planner.signature(call) for call in calls]
        for rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise ConfigValueError(
                    f"the batch of rank {rank} is not like that of rank 0: {cause(signature, signatures[0])}"
                )
        return calls

    def _runner(self, call: Call) -> RanksProgram:
        """The ranks' program for this call. Before the program changes, the last step is finished."""
        planner = self.step.planner
        with torch._C.DisableTorchFunctionSubclass():
            known, running = planner.known_plan(call), self._running
            known = None if known is None else self._chosen(known)
            same = self._params is planner.watch.params
            if same and known is not None and running is not None and running.program is known.compiled.program:
                if all(executor.is_bound() for executor in running.executors):
                    return running
        self.synchronize()
        if not same:
            self._take_parameters()
        plan = self._plan(call)
        try:
            return self._bound(plan)
        except LayoutConflict as conflict:
            with self._shapes_only():
                planner.replan(plan, call, conflict)
            return self._bound(plan)

    def _take_parameters(self) -> None:
        """After the user has replaced parameters, drop all programs that work on the old ones."""
        for rank in self._ranks:
            rank.open()
        self._made.clear()
        self._params = self.step.planner.watch.params
        self._params_of = [dict(model.named_parameters()) for model in self.models]

    def _plan(self, call: Call) -> Plan:
        with self._shapes_only():
            plan = self.step.planner.plan(call)
        return self._chosen(plan)

    def _chosen(self, plan: Plan) -> Plan:
        """What runs in place of the plan of a call."""
        if self._micro_batches.is_early:
            return self._micro_batches.plan(plan)
        return plan if plan.compiled.program.training else self.step.planner.on_parts(plan, self._ranks[0].divided)

    @contextmanager
    def _shapes_only(self) -> Iterator[None]:
        """Inside the `with` block the step's own model can be traced. It may be the model of rank 0."""
        with self.step.session.shapes_only(), self._ranks[0].shapes_only():
            yield

    def _bound(self, plan: Plan) -> RanksProgram:
        """The ranks' program of a plan, with bound storage. Raises LayoutConflict if the plan's layout does not fit."""
        found = self._made.get(plan)
        if found is None or found.program is not plan.compiled.program:
            found = self._made[plan] = self._make(plan.compiled.program)
        for rank, executor in zip(self._ranks, found.executors, strict=True):
            rank.hand_over(executor)
        for executor in found.executors:
            if not executor.is_bound():
                executor.bind()
        return found

    def _make(self, program: Program) -> RanksProgram:
        executors = [
            each.make(program, self._params_of[rank], dict(self.models[rank].named_buffers()), self.optimizers[rank])
            for rank, each in enumerate(self._ranks)
        ]
        for executor in executors:
            executor.guard = self._guard
        return RanksProgram(program, executors)

    def _exchange(self, rank: int) -> Callable[[Mesh, Any], Exchange]:
        return lambda mesh, key: LocalExchange(mesh, rank, lambda other: self._ranks[other].parts(key))
