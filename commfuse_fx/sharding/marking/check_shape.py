"""Checks of a strategy against the shape of the tensor that it is for."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.sharding.marking.strategy import Axes, Counts, TensorStrategy


def check_shape(strategy: TensorStrategy, shape: Sequence[int], label: str) -> None:
    """Raise ConfigValueError if a strategy fits a tensor of this shape on no mesh."""
    entries = (
        strategy.slices if isinstance(strategy, Counts) else strategy.names if isinstance(strategy, Axes) else None
    )
    if entries is not None and len(entries) != len(shape):
        raise ConfigValueError(
            f"{label} is {strategy}, which has {len(entries)} entries, but the tensor has {len(shape)} dimensions "
            f"(shape {tuple(shape)}); give one entry per dimension"
        )
    if isinstance(strategy, Counts):
        for dim, count in enumerate(strategy.slices):
            check_divides(count, 1, dim, strategy, shape, label)


def check_divides(
    count: int, blocks: int, dim: int, strategy: TensorStrategy, shape: Sequence[int], label: str
) -> None:
    """Raise ConfigValueError if a dimension of `blocks` blocks does not divide into `count` slices of each block."""
    size = shape[dim]
    if size % (count * blocks):
        each = f" of each of {blocks} blocks" if blocks > 1 else ""
        raise ConfigValueError(
            f"{label} is {strategy}: dimension {dim} of shape {tuple(shape)} has size {size}, which does not divide "
            f"into {count} slices{each}; give a number of slices that divides {size}, or pad the dimension"
        )
