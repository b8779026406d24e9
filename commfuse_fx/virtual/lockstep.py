"""`lockstep` runs all ranks of a compiled step in this process, and finds where they begin to disagree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from commfuse_fx.errors import ConfigTypeError, ConfigValueError, NotAvailableError
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.request import Call
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.virtual.replicas import Disagreement, Replicas
from commfuse_fx.virtual.virtual_world import LockstepWorld, RankResult


@dataclass(frozen=True)
class LockstepResult:
    """The result of one step of all ranks.

    losses: each rank's own loss.
    disagreement: the first value that ranks should have in common and do not, or None.
    compared: how many values were compared.
    """

    losses: tuple[torch.Tensor, ...]
    disagreement: Disagreement | None
    compared: int
    _ranks: Sequence[RankResult] = field(repr=False)
    _parameters: Mapping[str, torch.Tensor] = field(repr=False)
    _buffers: Mapping[str, torch.Tensor] = field(repr=False)
    _gradients: _Gradients | None = field(repr=False)

    @property
    def loss(self) -> torch.Tensor:
        """The mean of the ranks' losses."""
        return torch.stack(self.losses).mean()

    @cached_property
    def grads(self) -> Mapping[str, torch.Tensor]:
        """The synchronised gradients of rank 0, each of the whole parameter, by name. Empty for a step in eval mode.

        A step with an optimizer does not keep its gradients. So the first access computes them: it runs the same step
        without the optimizer, from the values before the step, and drops no collective.
        """
        return self._ranks[0].grads if self._gradients is None else self._gradients.compute()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole value of each parameter on rank 0 after this step, by name."""
        return dict(self._parameters)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The value of each buffer on rank 0 after this step, by name."""
        return dict(self._buffers)

    def __str__(self) -> str:
        if self.disagreement is None:
            return f"all ranks agree ({self.compared} values compared), loss {float(self.loss):.6g}"
        return f"{self.disagreement}; loss {float(self.loss):.6g}"


class Lockstep:
    """All ranks of a compiled step in this process, as `lockstep` makes them.

    Each call runs one step of all ranks, from the state in which the call before has left them.

    models, optimizers: copies of the user's model and optimizer, one per rank. The user's own never change, and each
    call finds the attributes that a forward sets as they are there.
    """

    def __init__(self, lowered: Lowered, drop: Collection[str], tolerance: float) -> None:
        self.lowered = lowered
        self.drop = tuple(drop)
        self.tolerance = tolerance
        self._step: CompiledStep = lowered._call.step
        self._world = LockstepWorld(self._step, own_model=False)
        self._results: list[LockstepResult] = []
        self.models = self._world.models
        self.optimizers = self._world.optimizers

    @user_frames_only
    def __call__(self, *args: Any, **kwargs: Any) -> LockstepResult:
        """Run one step of all ranks on a global batch. Without arguments the batch is the one that `lower` got.

        The global batch has the rows of all ranks together. Tensors with as many rows as the first tensor are divided:
        among all ranks with data_parallel, else along the mesh axes of `Program.batch_axes`. With full_batch=True
        every rank gets the whole batch.

        Raises ConfigValueError if the batch does not divide among the ranks, or if a name in `drop` is no collective
        of this step.
        """
        if not args and not kwargs:
            args, kwargs = self.lowered._call.args, dict(self.lowered._call.kwargs)
        calls = self._divide(self._step.planner.take_apart(args, kwargs))
        gradients = _Gradients.before(self._step, self._world, calls) if self._step.optimizer is not None else None
        check = _Check(self._world, self.tolerance)
        ranks = self._world.run(calls, drop=self.drop, observe=check)
        self._world.synchronize()
        assert check.replicas is not None, "a program has nodes"
        result = LockstepResult(
            tuple(rank.loss for rank in ranks),
            check.replicas.first,
            check.replicas.compared,
            ranks,
            {name: param.detach().clone() for name, param in self.models[0].named_parameters()},
            {name: buffer.detach().clone() for name, buffer in self.models[0].named_buffers()},
            gradients,
        )
        self._results.append(result)
        return result

    @property
    def disagreement(self) -> Disagreement | None:
        """The first disagreement over all steps so far, or None."""
        return next((result.disagreement for result in self._results if result.disagreement is not None), None)

    def report(self) -> str:
        """The results of the steps so far as text, one line per step."""
        dropped = f", without {', '.join(self.drop)}" if self.drop else ""
        lines = [f"lockstep of {self._step.mesh.world} ranks ({self._step.mesh}){dropped}"]
        lines += [f"  step {number}: {result}" for number, result in enumerate(self._results)]
        return "\n".join(lines if self._results else [*lines, "  no step has run yet: call it with a batch"]) + "\n"

    def __str__(self) -> str:
        return self.report()

    def _divide(self, call: Call) -> list[Call]:
        """Each rank's arguments."""
        mesh, axes = self._batch_axes()
        batched = [tensor for _, tensor in call.leaves if tensor.ndim]
        world = self._step.mesh.world
        if not axes or not batched:
            return [call] * world
        rows, ways = batched[0].shape[0], mesh.size(axes)
        if rows % ways:
            raise ConfigValueError(
                f"the global batch of {rows} rows does not divide among {ways} ranks ({axes}): give lockstep the batch "
                f"of all ranks together, of a multiple of {ways} rows"
            )
        size = rows // ways
        calls: list[Call] = []
        for rank in range(world):
            begin = mesh.index(axes, rank) * size
            leaves = [
                (path, tensor[begin : begin + size] if tensor.ndim and tensor.shape[0] == rows else tensor)
                for path, tensor in call.leaves
            ]
            calls.append(Call(call.structure, leaves))
        return calls

    def _batch_axes(self) -> tuple[Mesh, str]:
        config, program = self._step.config, self.lowered._program
        if config.full_batch or config.parallel_mode == "stand_alone":
            return self._step.mesh, ""
        if config.parallel_mode in ("data_parallel", "hybrid_parallel"):
            return self._step.mesh, self._step.mesh.all_axes
        return program.mesh, program.batch_axes


@user_frames_only
def lockstep(
    lowered: Lowered, world: int | None = None, drop: Collection[str] = (), tolerance: float = 0.0
) -> Lockstep:
    """Run all ranks of a compiled step in this process, on copies of its model and optimizer, and compare replicas.

        check = cf.lockstep(step.lower(x, y), world=8)
        check(x, y)
        print(check.report())

    It finds where ranks begin to differ. It does not notice when all ranks agree on a wrong number: for that, compare
    `loss`, `grads` and `parameters()` of the result with a run on one device.

    lowered: what `CompiledStep.lower` returned.
    world: the number of ranks. It may be left out, and has to be that of the step's mesh.
    drop: names of collectives (as in `lowered.text()`) to leave out. Ranks then go on with their own data.
    tolerance: how much values that ranks must share may differ, relative to their size or to 1. 0 compares bit by bit.

    Raises ConfigTypeError if `lowered` is not a Lowered, ConfigValueError for another world than the step's or for a
    Lowered that `cf.load` read, and NotAvailableError for a compiled module.
    """
    if not isinstance(lowered, Lowered):
        raise ConfigTypeError(f"lowered={lowered!r} is not a lowered step: pass step.lower(*args)")
    if isinstance(drop, str):
        raise ConfigTypeError(f"drop={drop!r} is one string: pass a list of names, [{drop!r}]")
    if lowered._call.step is None:
        raise ConfigValueError(
            "lowered is one that cf.load read: values of constants, model and optimizer are not in its files; pass "
            "step.lower(*args) of the step itself"
        )
    if lowered.program.has_two_halves:
        raise NotAvailableError(
            "cf.lockstep() is not available yet for the module form: compile the step (loss_fn= or optimizer=), whose "
            "buckets are the same"
        )
    size = lowered._call.step.mesh.world
    if world is not None and world != size:
        raise ConfigValueError(
            f"world={world!r}, but the step was compiled for {size} ranks ({lowered._call.step.mesh}): pass "
            f"world={size}, or compile it with device_num={world!r}"
        )
    return Lockstep(lowered, drop, tolerance)


class _Check:
    """Compares replicas of whichever program the world runs."""

    def __init__(self, world: LockstepWorld, tolerance: float) -> None:
        self._world = world
        self._tolerance = tolerance
        self.replicas: Replicas | None = None

    def __call__(self, node: Any, values: Sequence[Mapping[Any, Any]]) -> None:
        if self.replicas is None:
            running = self._world._running
            assert running is not None
            self.replicas = Replicas(running.program, self._tolerance)
            self.replicas.given(values, list(running.program.sources))
        self.replicas(node, values)


@dataclass(frozen=True)
class _Gradients:
    """The ranks' values and the random state before a step, from which its gradients can be computed afterwards."""

    step: CompiledStep
    values: Sequence[Mapping[str, torch.Tensor]]
    calls: Sequence[Call]
    random: torch.Tensor

    @classmethod
    def before(cls, step: CompiledStep, world: LockstepWorld, calls: Sequence[Call]) -> _Gradients:
        values = [
            {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
            for model in world.models
        ]
        return cls(step, values, calls, torch.get_rng_state())

    def compute(self) -> Mapping[str, torch.Tensor]:
        config = self.step.config
        if isinstance(config.cluster, StepProfile):  # of the step with its optimizer
            config = replace(config, cluster=config.cluster.cluster)
        config = replace(config, device_num=self.step.mesh.world, global_rank=0, schedule="overlap", accumulate_steps=1)
        world = LockstepWorld(CompiledStep(self.step.model, self.step.loss_fn, None, config), own_model=False)
        with torch.no_grad():
            for model, values in zip(world.models, self.values, strict=True):
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    tensor.copy_(values[name])
        held = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            return world.run(self.calls)[0].grads
        finally:
            torch.set_rng_state(held)
