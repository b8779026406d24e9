"""Run all ranks of a virtual world in this process: to debug a compiled step, and to check it against one device."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program
from commfuse_fx.planner import Call
from commfuse_fx.runtime.executor import Executor
from commfuse_fx.runtime.guard import Guard
from commfuse_fx.runtime.lockstep import Lockstep
from commfuse_fx.runtime.storage import FlatPool, LayoutConflict
from commfuse_fx.step import CompiledStep, accumulate


@dataclass(frozen=True)
class RankResult:
    """What one rank's step gives. `grads`: parameter name -> synchronised gradient of this step, empty with an
    optimizer."""

    loss: torch.Tensor
    grads: Mapping[str, torch.Tensor]


class LockstepWorld:
    """The ranks of a step compiled with `device_num`. Rank 0 is the step's own model and optimizer.

    `models` and `optimizers` hold one copy per rank (of the values at construction), as each process of a
    real world would; attach one learning-rate scheduler to each optimizer. `world(batches)` runs one
    step of all ranks.

    With `ScheduleConfig(across_steps=True)` a step leaves updates to the following one, here as on devices. Reading a
    parameter or an optimizer's state of any rank finishes them; so does `synchronize`.
    """

    def __init__(self, step: CompiledStep) -> None:
        self.step = step
        copies = [copy.deepcopy((step.model, step.optimizer)) for _ in range(1, step.mesh.world)]
        ranks = [(step.model, step.optimizer), *copies]
        self.models: list[nn.Module] = [model for model, _ in ranks]
        self.optimizers: list[torch.optim.Optimizer | None] = [optimizer for _, optimizer in ranks]
        self._pools = [FlatPool() for _ in ranks]
        self._known: dict[int, Lockstep] = {}
        self._running: Lockstep | None = None  # that of the last step, which may have left updates
        self._guard = Guard(self.synchronize)

    def __call__(self, batches: Sequence[tuple[Any, ...]], *, drop: Collection[str] = ()) -> list[RankResult]:
        """One step. `batches[rank]` are the arguments of that rank's call (with full_batch: the same for all).

        drop: names of collectives to leave out; what follows must then differ from a correct step.
        Raises ConfigValueError when batches differ in structure or shapes, or their number is not the world's.
        """
        if len(batches) != len(self.models):
            raise ConfigValueError(f"{len(batches)} batches for {len(self.models)} ranks: give one per rank")
        calls = self._calls(batches)
        running = self._running = self._runner(calls[0])
        try:
            outputs = running.step([dict(call.leaves) for call in calls], drop)
        except BaseException:
            self.synchronize()
            raise
        results: list[RankResult] = []
        # Looks at guarded parameters, but not at their values.
        with torch._C.DisableTorchFunctionSubclass():
            for executor, (loss, *grads) in zip(running.executors, outputs, strict=True):
                executor.storage.publish()
                if executor.optimizer is not None and self.step.model.training:
                    executor.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a rank's own step does
                results.append(RankResult(loss, dict(zip(running.program.grads, grads, strict=True))))
                for name, grad in results[-1].grads.items():
                    accumulate(executor.params[name], grad)
            if running.is_pending and not self._guard.is_closed:
                self._guard.close(tensor for each in running.executors for tensor in each.storage.tensors())
        return results

    def synchronize(self) -> None:
        """Finish what the last step has left to the following one."""
        try:
            if self._running is not None:
                self._running.finish()
        finally:
            self._guard.open()

    @property
    def is_pending(self) -> bool:
        """Whether updates of the last step are still to come."""
        return self._running is not None and self._running.is_pending

    def collectives(self, batch: tuple[Any, ...]) -> list[str]:
        """Names of the collectives of a call with these arguments, in issue order: what `drop` takes."""
        self.synchronize()
        program = self.step.planner.plan(self.step.planner.take_apart(batch, {})).compiled.program
        return [info(node).name for node in program.collectives()]

    def _calls(self, batches: Sequence[tuple[Any, ...]]) -> list[Call]:
        """The ranks' arguments, which have to be alike."""
        with torch._C.DisableTorchFunctionSubclass():
            calls = [self.step.planner.take_apart(batch, {}) for batch in batches]
            signatures = [self.step.planner.signature(call) for call in calls]
        for rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise ConfigValueError(
                    f"the batch of rank {rank} is not like that of rank 0: {signature.difference(signatures[0])}"
                )
        return calls

    def _runner(self, call: Call) -> Lockstep:
        """What runs this call; another program than that of the last step begins when that step is complete."""
        planner = self.step.planner
        with torch._C.DisableTorchFunctionSubclass():
            known, running = planner.known_plan(call), self._running
            if known is not None and running is not None and running.program is known.compiled.program:
                if all(executor.storage.is_bound() for executor in running.executors):
                    return running
        self.synchronize()
        plan = planner.plan(call)
        found = self._of(plan.compiled.program)
        try:
            _bind(found.executors)
        except LayoutConflict as conflict:
            planner.replan(plan, call, conflict)
            found = self._of(plan.compiled.program)
            _bind(found.executors)
        return found

    def _of(self, program: Program) -> Lockstep:
        """The ranks of a program, kept as long as the program is: they hold the flat storage."""
        if id(program) not in self._known:
            executors = [
                Executor(
                    program,
                    dict(model.named_parameters()),
                    dict(model.named_buffers()),
                    self.optimizers[rank],
                    None,
                    rank,
                    self._pools[rank],
                )
                for rank, model in enumerate(self.models)
            ]
            self._known[id(program)] = Lockstep(program, executors)
        return self._known[id(program)]


def _bind(executors: Sequence[Executor]) -> None:
    for executor in executors:
        if not executor.storage.is_bound():
            executor.storage.bind()
