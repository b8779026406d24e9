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
from commfuse_fx.runtime.executor import Executor
from commfuse_fx.runtime.lockstep import run_lockstep
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
    """

    def __init__(self, step: CompiledStep) -> None:
        self.step = step
        copies = [copy.deepcopy((step.model, step.optimizer)) for _ in range(1, step.mesh.world)]
        ranks = [(step.model, step.optimizer), *copies]
        self.models: list[nn.Module] = [model for model, _ in ranks]
        self.optimizers: list[torch.optim.Optimizer | None] = [optimizer for _, optimizer in ranks]
        self._pools = [FlatPool() for _ in ranks]
        self._bound: dict[int, tuple[Program, list[Executor]]] = {}

    def __call__(self, batches: Sequence[tuple[Any, ...]], *, drop: Collection[str] = ()) -> list[RankResult]:
        """One step. `batches[rank]` are the arguments of that rank's call (with full_batch: the same for all).

        drop: names of collectives to leave out; what follows must then differ from a correct step.
        Raises ConfigValueError when batches differ in structure or shapes, or their number is not the world's.
        """
        if len(batches) != len(self.models):
            raise ConfigValueError(f"{len(batches)} batches for {len(self.models)} ranks: give one per rank")
        calls = [self.step.planner.take_apart(batch, {}) for batch in batches]
        signatures = [self.step.planner.signature(call) for call in calls]
        for rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise ConfigValueError(
                    f"the batch of rank {rank} is not like that of rank 0: {signature.difference(signatures[0])}"
                )
        plan = self.step.planner.plan(calls[0])
        executors = self._executors(plan.compiled.program)
        try:
            _bind(executors)
        except LayoutConflict as conflict:
            self.step.planner.replan(plan, calls[0], conflict)
            executors = self._executors(plan.compiled.program)
            _bind(executors)
        program = plan.compiled.program
        inputs = [
            dict(zip(program.sources.values(), executor.gather(dict(call.leaves)), strict=True))
            for executor, call in zip(executors, calls, strict=True)
        ]
        outputs = run_lockstep(program, inputs, step_optimizers=[each.step_optimizer for each in executors], drop=drop)
        results: list[RankResult] = []
        for executor, (loss, *grads) in zip(executors, outputs, strict=True):
            executor.storage.publish()
            if executor.optimizer is not None and self.step.model.training:
                executor.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a rank's own step does
            results.append(RankResult(loss, dict(zip(program.grads, grads, strict=True))))
            for name, grad in results[-1].grads.items():
                accumulate(executor.params[name], grad)
        return results

    def collectives(self, batch: tuple[Any, ...]) -> list[str]:
        """Names of the collectives of a call with these arguments, in issue order: what `drop` takes."""
        program = self.step.planner.plan(self.step.planner.take_apart(batch, {})).compiled.program
        return [info(node).name for node in program.collectives()]

    def _executors(self, program: Program) -> list[Executor]:
        """One per rank, kept as long as the program is: they hold the flat storage."""
        known = self._bound.get(id(program))
        if known is None:
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
            known = self._bound[id(program)] = (program, executors)
        return known[1]


def _bind(executors: Sequence[Executor]) -> None:
    for executor in executors:
        if not executor.storage.is_bound():
            executor.storage.bind()
