"""The batch that a step is traced with, where that is not the one that a rank is handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.planning.request import CompileRequest, Sharding
from commfuse_fx.support.checks import rows_that_divide

Leaves = Sequence[tuple[str, torch.Tensor]]
"""Tensors of a call, with their paths."""


def on_one_part(request: CompileRequest) -> CompileRequest:
    """The request for a rank's part of the batch, where every rank is handed all of it (full_batch).

    Raises ConfigValueError where the batch does not divide among the ranks.
    """
    leaves, config, world = request.call.leaves, request.config, request.mesh.world
    paths = _paths_of_batch(leaves)
    if not config.full_batch or world == 1 or not paths or config.parallel_mode == "stand_alone":
        return request
    batch = dict(leaves)[paths[0]].shape[0]
    if batch % world:
        raise ConfigValueError(
            f"full_batch=True: the global batch of {batch} does not divide by {world} devices; "
            f"{rows_that_divide(batch, world)}"
        )
    rows = batch // world
    local = [(path, tensor[:rows] if path in paths else tensor) for path, tensor in leaves]
    return _on(request, local, paths, None)


def on_whole_batch(request: CompileRequest, sharding: Sharding) -> CompileRequest:
    """The request for one device, which would be handed the batches of `sharding.batch_ways` ranks together."""
    leaves, ways = request.call.leaves, sharding.batch_ways
    paths = _paths_of_batch(leaves)
    if ways == 1:
        return _on(request, leaves, paths, sharding)
    rows = dict(leaves)[paths[0]].shape[0] if paths else 0
    return _on(request, with_rows(leaves, rows * ways), paths, sharding)


def with_rows(leaves: Leaves, rows: int) -> list[tuple[str, torch.Tensor]]:
    """The same tensors with a batch of so many rows, whose values are not set."""
    paths = _paths_of_batch(leaves)
    return [(path, tensor.new_empty((rows, *tensor.shape[1:])) if path in paths else tensor) for path, tensor in leaves]


def _paths_of_batch(leaves: Leaves) -> list[str]:
    """Of the tensors whose dimension 0 is that of the first one."""
    batched = [(path, tensor.shape[0]) for path, tensor in leaves if tensor.ndim]
    return [path for path, rows in batched if rows == batched[0][1]]


def _on(request: CompileRequest, leaves: Leaves, paths: list[str], sharding: Sharding | None) -> CompileRequest:
    passes = replace(request.passes, sliced_inputs=paths, sharding=sharding)
    return replace(request, call=replace(request.call, leaves=leaves), passes=passes)
