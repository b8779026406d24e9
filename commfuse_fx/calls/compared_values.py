"""What counts as the same value of a step and of its replay, and what ranks must hold alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.ir.core.collectives import collective_of, group_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.variants.before_fusion import keeps_bits_of_two_ranks
from commfuse_fx.runtime.execute.code.whole_vectors import rounded_otherwise
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.replayed_step import Pair
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.runtime.memory.shards import Shards

_EPSILONS = 1000
"""Sums in another order differ by so many epsilons of the largest value of a tensor at most; in half precision by
fewer, as an epsilon is much there."""

_HALF_EPSILONS = 16

_LONGEST_STEP = 10
"""The update of an adaptive optimizer is so many times the learning rate at most. A gradient that is nothing but
rounding decides its direction."""

_AS_EXACT_AS_SUMS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "sum")
"""States of adaptive optimizers that follow the sums of gradients. Others hold what a division has made of them."""

_STATES_OF_NONE = ("loss", "gradient", "sum of gradients", "output", "buffer")


@dataclass(frozen=True)
class Difference:
    """Where a value of a step differs most from its replay.

    index: the place in the tensor. found, replayed: the two values there.
    """

    index: tuple[int, ...]
    found: float
    replayed: float

    @property
    def size(self) -> float:
        """Of the difference; NaN if one of the values is NaN."""
        return abs(self.found - self.replayed)


class ComparedValues:
    """Compares values of the steps of one plan with those of their replays.

    bitwise: whether every bit has to be the same. Else sums may have another order.
    """

    def __init__(self, compiled: Compiled, replayed: Program, executor: Executor) -> None:
        program = compiled.program
        self.bitwise = _sums_two_terms(program, replayed)
        self.bitwise = self.bitwise and keeps_bits_of_two_ranks(compiled.pipeline, compiled.records)
        is_exact = not executor.devices or torch.are_deterministic_algorithms_enabled()
        self.bitwise = self.bitwise and is_exact
        self._rounded = dict.fromkeys(rounded_otherwise(program))
        self._reorders_locally = program.config.backend == "inductor" or not is_exact
        self._rules = {
            name: update.rule
            for update in program.updates
            for segment in update.segments
            for name, _ in segment.members
        }
        groups = [] if executor.optimizer is None else executor.optimizer.param_groups
        self._rate = max((float(group["lr"]) for group in groups if "lr" in group), default=0.0)
        sums = [collective_of(node) for node in program.collectives() if collective_of(node).reduce_op]
        self._sent_types = [each.dtype for each in sums if each.dtype.is_floating_point]

    def differences(self, pairs: Sequence[Pair]) -> list[tuple[Pair, Difference]]:
        """Those that are not the same."""
        scales = [0.0 if self._is_exact(pair) else _largest(pair.replayed) for pair in pairs]
        if self._reorders_locally:  # gradients that are nothing but rounding have no scale of their own
            by_kind: dict[str, float] = {}
            for pair, scale in zip(pairs, scales, strict=True):
                by_kind[pair.kind] = max(by_kind.get(pair.kind, 0.0), scale)
            scales = [by_kind[pair.kind] for pair in pairs]
        found = ((pair, self._difference(pair, scale)) for pair, scale in zip(pairs, scales, strict=True))
        return [(pair, difference) for pair, difference in found if difference is not None]

    def _is_exact(self, pair: Pair) -> bool:
        return self.bitwise and not (pair.name in self._rounded and pair.kind not in _STATES_OF_NONE)

    def _difference(self, pair: Pair, scale: float) -> Difference | None:
        found, replayed = pair.found.detach(), pair.replayed.detach()
        if found.shape != replayed.shape or found.dtype != replayed.dtype:
            return Difference((), float("nan"), float("nan"))
        differs = (found != replayed) & ~(found.isnan() & replayed.isnan())
        if not bool(differs.any()):
            return None
        wide = torch.complex128 if found.is_complex() else torch.float64
        size = torch.where(differs, (found.to(wide) - replayed.to(wide)).abs(), 0.0).nan_to_num(torch.inf, torch.inf)
        if _is_rounded(found) and not self._is_exact(pair) and float(size.max()) <= self._allowed(pair, scale):
            return None
        index = tuple(int(each) for each in torch.unravel_index(size.argmax(), size.shape))
        return Difference(index, _number(found[index]), _number(replayed[index]))

    def _allowed(self, pair: Pair, scale: float) -> float:
        """How much elements of a tensor may differ where sums may have another order."""
        types = [torch.finfo(each) for each in (pair.replayed.dtype, *self._sent_types)]
        relative = max(each.eps * (_EPSILONS if each.bits > 16 else _HALF_EPSILONS) for each in types)
        is_adaptive = (
            not self.bitwise and pair.kind not in _STATES_OF_NONE and self._rules.get(pair.name, "sgd") != "sgd"
        )
        if not is_adaptive or pair.kind in _AS_EXACT_AS_SUMS:
            return relative * scale
        return (relative if pair.kind == "parameter" else 1.0) * scale + _LONGEST_STEP * self._rate


def _largest(value: torch.Tensor) -> float:
    """The largest absolute value that is finite."""
    if not value.numel() or not _is_rounded(value):
        return 0.0
    return float(value.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _is_rounded(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _number(value: torch.Tensor) -> float:
    return abs(complex(value)) if value.is_complex() else float(value)


def held_alike(executor: Executor, shards: Shards | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What other ranks hold as well, parameters and optimizer states: a label that says which part of what it is, the
    parameter's name, and the values."""
    mode, storage = executor.program.config.parallel_mode, executor.storage
    parts = {} if shards is None else shards.by_name
    for name, value in executor.values.items():
        if is_of_each_rank(executor.params[name], mode):
            continue
        part = parts.get(name)
        place = part.place if part is not None and part.is_divided else None
        yield from ((label, name, box) for label, box in _boxes(f"parameter {name}", value, place))
        state = None if storage.optimizer is None else storage.optimizer.state.get(storage.params[name])
        for key, tensor in (state or {}).items():
            if isinstance(tensor, torch.Tensor):
                is_part = part is not None and tensor.shape == part.updated.shape
                place = part.state_place if part and is_part else None
                yield from ((label, name, box) for label, box in _boxes(f"{key} of {name}", tensor, place))


def _boxes(label: str, value: torch.Tensor, place: Place | None) -> Iterator[tuple[str, torch.Tensor]]:
    if place is None:
        yield label, value
        return
    for box in place.boxes:
        rows = ", ".join(f"{begin}:{begin + size}" for begin, size in zip(box.offsets, box.sizes, strict=True))
        yield f"{label}[{rows}]", box.of(value.detach())


def _sums_two_terms(*programs: Program) -> bool:
    """Whether sums over ranks have two terms at most, also where one sum follows another along another axis."""
    sums = [node for each in programs for node in each.collectives() if collective_of(node).reduce_op]
    axes = dict.fromkeys(axis for node in sums for axis in group_of(node).split(","))
    return prod(programs[0].mesh.size(axis) for axis in axes) <= 2
