"""The two sides of a comparison: eager training (averaged where there are ranks) and the compiled step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from commfuse_fx.config.options import SEARCH_MODES
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.oracle import ACROSS_STEPS, APART_ACROSS_STEPS, OPTIMAL, SLOW
from tests.property.attribute_parts import take_attributes
from tests.property.idle_options import compiled_with_idle
from tests.property.random_cases import Case
from tests.property.random_models import eager_loss, make_batch
from tests.property.trainee import Trainee, make_trainee
from tests.recorders import recorded

Batch = tuple[torch.Tensor, ...]

_LINKS = resolve_cluster("gloo-1gbit")
WITHOUT_LATENCY = replace(
    _LINKS,
    levels=tuple(replace(level, alpha=0.0) for level in _LINKS.levels),
    device=replace(_LINKS.device, op_overhead=0.0, collective_overhead=0.0),
)
"""Prices by which a search divides small models."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "size": {"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
    "index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [1, 3]}}},
    "off": {"comm_fusion": {"openstate": False}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": SLOW},
    "preset": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across": ACROSS_STEPS,
    "apart_across": APART_ACROSS_STEPS,
    "ids": {},
    "unscheduled": {"schedule": "none"},
}


def inductor(case: Case) -> dict[str, Any]:
    return {"backend": "inductor", "inductor_regions": case.regions} if case.regions else {}


class Eager:
    """One trainee per rank, whose gradients are averaged: what DistributedDataParallel computes."""

    def __init__(self, trainees: Sequence[Trainee]) -> None:
        self.trainees = trainees

    def train(self, batches: Sequence[Batch], whole: bool) -> list[torch.Tensor]:
        """Returns the ranks' losses. whole: update too, and leave `.grad` as it was; else gradients are added there."""
        held = [[param.grad for param in each.model.parameters()] for each in self.trainees]
        losses: list[torch.Tensor] = []
        for trainee, batch in zip(self.trainees, batches, strict=True):
            for param in trainee.model.parameters():
                param.grad = None
            loss = self._loss(trainee, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self._average()
        for trainee, before in zip(self.trainees, held, strict=True):
            if whole:
                trainee.optimizer.step()
            for param, grad in zip(trainee.model.parameters(), before, strict=True):
                if whole or param.grad is None:
                    param.grad = grad
                elif grad is not None:
                    param.grad = grad.add_(param.grad)
        return losses

    def evaluate(self, batches: Sequence[Batch], training: bool) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for trainee, batch in zip(self.trainees, batches, strict=True):
            with torch.no_grad(), in_mode(trainee.model, training):
                losses.append(eager_loss(trainee.model, trainee.loss_fn, batch))
        return losses

    def _loss(self, trainee: Trainee, batch: Batch) -> torch.Tensor:
        return eager_loss(trainee.model, trainee.loss_fn, batch)

    def _average(self) -> None:
        if len(self.trainees) == 1:
            return
        for params in zip(*(each.model.parameters() for each in self.trainees), strict=True):
            if params[0].grad is not None:
                mean = torch.stack([param.grad for param in params]).mean(0)
                for param in params:
                    param.grad = mean.clone()


class Distributed(Eager):
    """This rank's trainee under DistributedDataParallel, which is made anew when parameters have changed."""

    def __init__(self, trainee: Trainee) -> None:
        super().__init__([trainee])
        self._wrapped: DistributedDataParallel | None = None
        self._wrapped_for: list[tuple[Any, ...]] = []

    def _loss(self, trainee: Trainee, batch: Batch) -> torch.Tensor:
        now = [(p, p.data_ptr(), p.requires_grad, p.dtype, p.stride()) for p in trainee.model.parameters()]
        same = len(now) == len(self._wrapped_for) and all(
            old[0] is new[0] and old[1:] == new[1:] for old, new in zip(self._wrapped_for, now, strict=True)
        )
        if self._wrapped is None or not same:
            self._wrapped = None
            self._wrapped = DistributedDataParallel(
                trainee.model, broadcast_buffers=False, find_unused_parameters=True, init_sync=False
            )
            self._wrapped_for = now
        return eager_loss(self._wrapped, trainee.loss_fn, batch)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Every submodule goes back to the mode that it had."""
    modes = [module.training for module in model.modules()]
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode


class Compiled:
    """The compiled step of one device, of this rank, or of all ranks in lockstep, with a trainee for each rank."""

    def __init__(self, case: Case) -> None:
        self.case = case
        trainee = make_trainee(case.model, case.optimizer, case.groups, case.flags)
        options = {**OPTIONS[case.fusion], **inductor(case)}
        if case.fusion == "ids":
            for number, part in enumerate((*trainee.model.parts, trainee.model.head)):
                cf.set_comm_fusion(part, number % 3)
        if case.marks:
            mark_parameters(trainee.model, case)
            options.update(parallel_mode="semi_auto", mesh=case.mesh, full_batch=True)
            if case.kind == "divided" and case.seed % 2:
                mode = SEARCH_MODES[case.seed // 2 % len(SEARCH_MODES)]
                options.update(parallel_mode="auto", search_mode=mode, cluster=WITHOUT_LATENCY)
        world = math.prod(case.mesh)
        if case.kind in ("lockstep", "divided"):
            options.update(device_num=world, global_rank=0)
        self.step = compiled_with_idle(
            case,
            trainee.model,
            loss_fn=trainee.loss_fn,
            optimizer=None if case.accumulate else trainee.optimizer,
            **options,
            form="step",
        )
        captures = case.kind in ("one", "ranks") and "across" not in case.fusion and not case.regions
        if captures and case.seed % 3 == 0:  # these run as they would from CUDA graphs
            recorded(self.step, first=1)
        self.trainees = [trainee]
        self.world: LockstepWorld | None = None
        if case.kind in ("lockstep", "divided"):
            self.trainees += [
                make_trainee(case.model, case.optimizer, case.groups, case.flags) for _ in range(world - 1)
            ]
            self.world = LockstepWorld(self.step)
            self.world.models = [each.model for each in self.trainees]
            self.world.optimizers = [None if case.accumulate else each.optimizer for each in self.trainees]

    def train(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        if self.world is None:
            (batch,) = batches
            return [self.step(*batch)]
        losses = [result.loss for result in self.world(batches)]
        for other in self.trainees[1:]:  # Python runs for the first rank only
            take_attributes(other.model, self.trainees[0].model)
        return losses

    def act(self, kind: str, seed: int) -> None:
        """Change nothing that anybody can see."""
        if kind == "retrace":
            self.step.retrace()
        else:
            assert self.step.lower(*make_batch(self.case.model, 4, seed, self.trainees[0].dtype)).text()

    def evaluate(self, batches: Sequence[Batch], training: bool) -> list[torch.Tensor]:
        entered = [in_mode(trainee.model, training) for trainee in self.trainees]
        with ExitStack() as stack:
            for each in entered:
                stack.enter_context(each)
            if training:
                stack.enter_context(torch.no_grad())
            return self.train(batches)


class Module:
    """The compiled module of this process or rank, in a loop of the user's own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        trainee = make_trainee(case.model, case.optimizer, case.groups, case.flags)
        options = {**({} if "across" in case.fusion else OPTIONS[case.fusion]), **inductor(case)}
        if case.kind == "module_ranks":  # as the DistributedDataParallel beside it
            options.update(broadcast_buffers=False, parameter_broadcast=False, find_unused_parameters=True)
        self.step = trainee.asked = compiled_with_idle(case, trainee.model, form="module", **options)
        self.trainees = [trainee]
        self._loop = _Loop(trainee, self.step)

    def train(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        return self._loop.train(batches, not self.case.accumulate)

    def evaluate(self, batches: Sequence[Batch], training: bool) -> list[torch.Tensor]:
        return self._loop.evaluate(batches, training)

    def act(self, kind: str, seed: int) -> None:
        """Change nothing that anybody can see."""
        if kind == "retrace":
            self.step.retrace()
        else:
            batch = make_batch(self.case.model, 4, seed, self.trainees[0].dtype)
            assert self.step.lower(*(batch if self.trainees[0].loss_fn is None else batch[:-1])).text()


class _Loop(Eager):
    def __init__(self, trainee: Trainee, module: nn.Module) -> None:
        super().__init__([trainee])
        self._module = module

    def _loss(self, trainee: Trainee, batch: Batch) -> torch.Tensor:
        return eager_loss(self._module, trainee.loss_fn, batch)


def mark_parameters(model: nn.Module, case: Case) -> None:
    """Divide some of the matrices over the mesh's last axis."""
    axis = ("dp", "tp")[len(case.mesh) - 1]
    size = case.mesh[-1]
    for number, (name, param) in enumerate(model.named_parameters()):
        mark = case.marks[number % len(case.marks)]
        if param.ndim != 2 or mark == 2 or param.shape[mark] % size or not param.numel():
            continue
        cf.shard(model, name, tuple(axis if dim == mark else None for dim in range(2)))
