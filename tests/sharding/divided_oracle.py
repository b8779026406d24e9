"""Train a step that is divided among ranks, and the same model on one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import commfuse_fx as cf
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures
from tests.models import Batch, Case
from tests.oracle import MakeOptimizer, assert_same_tensors, eager_loss, sgd, tensors_of

Mark = Callable[[nn.Module], object]

EXACT = 1e-11
SINGLE = 1e-6
"""Models that compute their loss, or norms, in single precision whatever their dtype is."""


def no_marks(model: nn.Module) -> None:
    """Data parallel."""


@dataclass
class Divided:
    """All ranks of a step on a mesh. `ways`: how many parts of the batch there are, where ranks are handed theirs;
    0 if each gets all of it."""

    case: Case
    world: LockstepWorld
    ways: int = 0

    def run(self, batch: Batch, **named: Any) -> list[torch.Tensor]:
        """One step; the losses of all ranks."""
        ranks = len(self.world.models)
        calls = [self.world.step.planner.take_apart(*self._part(batch, named, rank, ranks)) for rank in range(ranks)]
        return [result.loss for result in self.world.run(calls)]

    def _part(self, batch: Batch, named: dict[str, Any], rank: int, ranks: int) -> tuple[Batch, dict[str, Any]]:
        if not self.ways:
            return batch, named
        number = rank * self.ways // ranks

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(self.ways)[number] if tensor.ndim else tensor

        part: tuple[Batch, dict[str, Any]] = pytree.tree_map_only(torch.Tensor, cut, (batch, named))
        return part

    def layouts(self) -> dict[str, str]:
        """Of the parameters that the last graph divides: name -> placements by axis."""
        return {
            name: ", ".join(f"{placement} on {group}" for group, placement in param.layout)
            for name, param in self.program.params.items()
            if any(isinstance(placement, Shard) for _, placement in param.layout)
        }

    @property
    def program(self) -> Any:
        return next(reversed(self.world.step.planner.plans.values())).compiled.program

    def collectives(self, axis: str) -> dict[str, int]:
        """How many collectives of each kind the last graph has over this axis: {"forward all_reduce": 4}."""
        details = [(info(node).phase, info(node).collective) for node in self.program.collectives()]
        return dict(Counter(f"{phase} {each.kind}" for phase, each in details if each and each.group == axis))


def divided(
    case: Case,
    model: nn.Module,
    mesh: tuple[int, ...],
    mark: Mark = no_marks,
    make_optimizer: MakeOptimizer | None = sgd,
    ways: int = 0,
    **options: Any,
) -> Divided:
    """A marked copy of the model, compiled for all ranks of the mesh."""
    mine = copy.deepcopy(model)
    mark(mine)
    captures.share(mine, (case, mark))
    options.setdefault("parallel_mode", "semi_auto")
    step = cf.compile(
        mine,
        loss_fn=case.loss_fn,
        optimizer=make_optimizer(mine) if make_optimizer else None,
        mesh=mesh,
        device_num=prod(mesh),
        global_rank=0,
        full_batch=not ways,
        **options,
        form="step",
    )
    return Divided(case, LockstepWorld(step), ways)


def compare(
    case: Case,
    mesh: tuple[int, ...],
    mark: Mark = no_marks,
    make_optimizer: MakeOptimizer = sgd,
    *,
    tolerance: float = EXACT,
    steps: int = 3,
    gradients: bool = True,
    ways: int = 0,
    rows: int = 8,
    named: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> Divided:
    """Losses, parameters and buffers of all ranks after some steps; before, the gradients of a step without an
    optimizer."""
    model = case.model()
    batches = case.batches(steps, rows)
    named = list(named) or [{}] * steps
    if gradients:
        first = divided(case, model, mesh, mark, None, ways, **options)
        _compare_gradients(case, model, first, batches[0], named[0], tolerance)
    found = divided(case, model, mesh, mark, make_optimizer, ways, **options)
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(reference)
    for batch, more in zip(batches, named, strict=True):
        optimizer.zero_grad()
        loss = loss_of(case, reference, batch, more)
        loss.backward()
        optimizer.step()
        for other in found.run(batch, **more):
            torch.testing.assert_close(other, loss.detach(), rtol=SINGLE if tolerance > EXACT else EXACT, atol=EXACT)
    wanted = tensors_of(reference)
    for rank, mine in enumerate(found.world.models):
        assert_same_tensors(tensors_of(mine), wanted, tolerance, f"rank {rank}: ")
    return found


def _compare_gradients(
    case: Case, model: nn.Module, found: Divided, batch: Batch, named: dict[str, Any], tolerance: float
) -> None:
    reference = copy.deepcopy(model)
    loss_of(case, reference, batch, named).backward()
    found.run(batch, **named)
    wanted = tensors_of(reference, gradients=True)
    for rank, mine in enumerate(found.world.models):
        assert_same_tensors(tensors_of(mine, gradients=True), wanted, tolerance, f"rank {rank}: gradient of ")


def loss_of(case: Case, model: nn.Module, batch: Batch, named: dict[str, Any]) -> torch.Tensor:
    """On one device."""
    if not named:
        return eager_loss(case, model, batch)
    assert case.loss_fn is not None
    return case.loss_fn(model(*batch[:-1], **named), batch[-1])
