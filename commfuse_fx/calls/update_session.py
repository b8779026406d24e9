"""How the update of a compiled module's parameters is compiled and run, given gradients that the ranks have reduced.

Why: docs/decisions.md, "The update of a module is a graph of its own".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.calls.session import Session
from commfuse_fx.capture.build import describe_parameters
from commfuse_fx.config.compile_config import CompileConfig, ScheduleConfig
from commfuse_fx.errors import CommFuseError, NotAvailableError
from commfuse_fx.gradients.gradient_parts import GradientParts
from commfuse_fx.ir.core.meta import same_layout
from commfuse_fx.ir.rows.shard_rows import spec_of_rows
from commfuse_fx.ir.updates.update_sharing import divided_by_rule, in_rows
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.support.long_lists import shortened
from commfuse_fx.votes.runners import Runner


class CompiledUpdate(CompiledCall):
    """The update of a module as a graph of its own, whose inputs are the gradients.

    owner: the module, whose backward reduces them.
    """

    form = "update"

    def __init__(
        self, owner: CompiledCall, optimizer: torch.optim.Optimizer, parallel_optimizer_config: dict[str, Any] | None
    ) -> None:
        self._of_module = owner
        super().__init__(owner.model, None, optimizer, _config_of_update(owner.config, parallel_optimizer_config))

    def _make_session(self) -> Session:
        return UpdateSession(self.planner, self.rank, self._owner)

    @property
    def _owner(self) -> ModuleSession:
        assert isinstance(self._of_module.session, ModuleSession)
        return self._of_module.session

    @property
    def parts(self) -> GradientParts:
        """What the module's backward has reduced of gradients."""
        return self._owner.parts

    def examples(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """For each of these parameters a tensor that is like its gradient: rows where the module divides it."""
        with self._owner.shapes_only():
            found = {name: param.detach() for name, param in params.items()}
            if self._owner.planner.config.parallel_optimizer is None or self.mesh.world == 1:
                return found
            described, config = describe_parameters(self.model), self.config
        for name, reason in divided_by_rule(described, self.mesh, config).items():
            if name in found and not reason:
                rows = spec_of_rows(in_rows(described[name], self.mesh, config), self.mesh)
                found[name] = rows.empty(params[name].device)
        return found


class UpdateSession(Session):
    """The session of an update. Its ranks vote ahead of the first op, since there is no backward to hide a vote behind.

    owner: that of the module.
    """

    def __init__(self, planner: Planner, rank: int, owner: ModuleSession) -> None:
        super().__init__(planner, rank)
        self._owner = owner
        if owner.gathers:
            self.runners.executors.beneath = owner.shards_of
            self.voting.is_started = True  # forwards have been voted on

    def update(self) -> None:
        """Update the parameters that have a gradient.

        Raises CommFuseError for gradients that no backward has reduced, NotAvailableError inside of a `join()`, and
        what a step raises.
        """
        self.call((), {})

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.agreement is not None:
            self._refuse_join()
            self._refuse_unreduced()
        gradients = self._gradients()
        found = super()._run((gradients,), {})
        if (shards := self._owner.runners.executors.shards) is not None:
            shards.has_changed(gradients)
        return found

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """As of a step. Parameters that the module divides have memory as well."""
        with super().shapes_only(), self._owner.shapes_only():
            yield

    def executor(self, plan: Plan, call: Call) -> Executor:
        """As of a step. The module divides its parameters as the update does."""
        found = super().executor(plan, call)
        if found.shards is not None and found.shards.beneath is not None:
            self._owner.runners.executors.divide_by(found.shards.beneath)
        return found

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that the optimizer holds, by name, laid out as their parameters are: of those
        that are divided rows.

        A parameter that is none of the model's is found when the update is planned.
        """
        assert self.planner.optimizer is not None, "what updates has one"
        self.planner.watch.look()
        held = {id(param) for group in self.planner.optimizer.param_groups for param in group["params"]}
        params = self.planner.watch.params.items()
        learning = {name: param for name, param in params if id(param) in held and param.grad is not None}
        rows = self._owner.parts.rows
        if learning and self._owner.divides and not self._owner.knows_rows:
            raise CommFuseError(
                "ShardedOptimizer.step() ahead of the first forward of a module that divides gradients: these come "
                "from backwards of the module. torch.distributed.checkpoint makes such a step ahead of loading: call "
                "the module on a batch before, or load with optimizer.load_state_dict"
            )
        return {
            name: rows.take(name, param) if rows is not None and name in rows else _laid_out(param)
            for name, param in learning.items()
        }

    def _launch(self, plan: Plan, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        if self.agreement is not None:
            self.voting.cast(runner)
            self.voting.settle(runner)
        return super()._launch(plan, runner, inputs)

    def _refuse_join(self) -> None:
        if self._owner.uneven is not None and self._owner.uneven.roll is not None:
            raise NotAvailableError(
                "ShardedOptimizer.step() inside of join() is not available yet: a rank without batches would have to "
                "update its rows. Give all ranks as many batches (drop_last), or use an optimizer of torch.optim there"
            )

    def _refuse_unreduced(self) -> None:
        held = self._owner.params
        local = [name for name in self._owner.parts.local if name in held and held[name].grad is not None]
        if local:
            raise CommFuseError(
                f".grad of {', '.join(shortened(local, 4, '{} other parameters'))} holds gradients of this rank alone, "
                "as a backward under no_sync() leaves them: run the last backward before step() outside of it, or call "
                "zero_grad()"
            )


def _laid_out(param: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, or a copy of it that lies as the parameter does."""
    gradient = param.grad
    assert gradient is not None, "it learns"
    if same_layout(param.shape, gradient.stride(), param.stride()):
        return gradient
    return torch.empty_like(param, requires_grad=False).copy_(gradient)


def _config_of_update(config: CompileConfig, parallel_optimizer_config: dict[str, Any] | None) -> CompileConfig:
    """The options of a module's update: of those of the module it has the ones that say how something is sent."""
    return replace(
        config,
        enable_parallel_optimizer=True,
        parallel_optimizer_config=parallel_optimizer_config,
        return_loss=False,
        parameter_broadcast=False,
        broadcast_buffers=False,
        find_unused_parameters=False,
        capture="trace",
        schedule="none" if config.schedule == "none" else ScheduleConfig(),
        cluster=config.figures,
        replan=False,
        backend="eager",
        cuda_graph=False,
    )
