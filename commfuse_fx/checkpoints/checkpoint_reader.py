"""Reading a checkpoint on this rank: its values, and the tensors that the rank takes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from commfuse_fx.checkpoints.checkpoint_index import NAME, CheckpointIndex
from commfuse_fx.checkpoints.folders import CheckpointFolder
from commfuse_fx.checkpoints.held import Stored, filled
from commfuse_fx.checkpoints.plain_values import decoded
from commfuse_fx.errors import CheckpointError, CommFuseError
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.runtime.ranks.ballots import hash62

Values = dict[str, Any]

_BESIDES = ("random", "plan", "extra")
"""What a checkpoint has besides the state of the step."""


class CheckpointReader:
    """A checkpoint as one rank in a world of `size` ranks finds it.

    values: those that it goes on with, with `Stored` in place of tensors. Raises CheckpointError for what is no
    checkpoint, or a damaged one, and ConfigTypeError for what is no path.
    """

    def __init__(self, folder: object, rank: int, size: int) -> None:
        where = CheckpointFolder(folder)
        try:
            self._path = where.existing()
            self._file = self._present_file()
        except OSError as error:
            raise CheckpointError(f"the checkpoint in {str(where.path)!r} cannot be read: {error}") from error
        try:
            self._index = CheckpointIndex.load(self._path / NAME)
        except CommFuseError as error:
            raise CheckpointError(f"the checkpoint cannot be read: {error}") from error
        self.world = self._index.world
        self._size = size
        found, self._names = self._index.of_rank(rank, size)
        self._stored: dict[str, Stored] = {}
        self.values: Values = decoded(found, self._store)
        if not isinstance(self.values, dict) or any(name not in self.values for name in _BESIDES):
            raise CheckpointError(f"the checkpoint in {str(self._path)!r} lacks one of {', '.join(_BESIDES)}")

    def _store(self, path: str) -> Stored:
        name = self._names.get(path, path)
        if name not in self._index.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}: take another checkpoint")
        self._stored[name] = Stored(name, self._index.tensors[name].shape)
        return self._stored[name]

    @property
    def identity(self) -> int:
        """The same on ranks that have found the same checkpoint: a folder may be another one on each host, or be
        replaced between the reads of two ranks."""
        return hash62(json.dumps([self._index.files, self._index.values]))

    @property
    def state(self) -> Values:
        """The state of the step, as `StepState` has it."""
        return {name: each for name, each in self.values.items() if name not in _BESIDES}

    def check_world(self, paths: Mapping[str, str]) -> None:
        """Raises CheckpointError if a world of another size cannot take what each rank has of its own.

        paths: of tensors that only the rank has that saved them, with names for people.
        """
        own = [name for path, name in paths.items() if any(path in rank["tensors"] for rank in self._index.ranks)]
        if own and self._size != self.world:
            raise CheckpointError(
                f"each rank has its own {own[0]} (layerwise_parallel), and there were {self.world} ranks when it was "
                f"saved; this world has {self._size}: load it on {self.world} ranks"
            )

    def read(self, places: Mapping[str, Place]) -> Values:
        """The values with tensors, on the host: parts of those that have a place here, by name, and all of others."""
        wanted = {name: places.get(name) or Place.of_whole(each.shape) for name, each in self._stored.items()}
        try:
            tensors: dict[str, torch.Tensor] = _reader().read_parts(self._path, self._index, wanted)
        except (OSError, CheckpointError) as error:
            where = repr(str(self._path))
            if self._is_replaced():
                raise CheckpointError(
                    f"{where} has been replaced by a save while it was read: load it again"
                ) from error
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the checkpoint in {where} cannot be read: {error}") from error
        found: Values = filled(self.values, tensors)
        return found

    def _present_file(self) -> tuple[int, int]:
        """What tells the index in the folder from another one that takes its place. Raises OSError."""
        found = os.stat(self._path / NAME)
        return found.st_ino, found.st_mtime_ns

    def _is_replaced(self) -> bool:
        try:
            return self._present_file() != self._file
        except OSError:
            return False


def _reader() -> Any:
    """A module that is imported at the first load, as the writer at the first save."""
    return import_module("commfuse_fx.checkpoints.tensor_reader")
