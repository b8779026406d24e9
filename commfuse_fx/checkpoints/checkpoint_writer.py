"""Writing one checkpoint, on all ranks: what they hold, who writes what, the files, and the folder that appears."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from commfuse_fx.checkpoints.checkpoint_index import NAME, CheckpointIndex
from commfuse_fx.checkpoints.folders import CheckpointFolder
from commfuse_fx.checkpoints.held import Held
from commfuse_fx.checkpoints.plain_values import encoded
from commfuse_fx.checkpoints.shares import Report, Shares, Write, share
from commfuse_fx.errors import CheckpointError
from commfuse_fx.runtime.ranks.ballots import hash62
from commfuse_fx.runtime.ranks.meeting import Meeting


class CheckpointWriter:
    """Writes one checkpoint. All ranks make one together, and call its methods together.

    what: they do, for messages. folder: where to, as the user gives it. state: gives nested dicts of plain values and
    `Held`. Raises CheckpointError, and on ranks where nothing is wrong PeerFailedError; nothing has been written then.
    """

    def __init__(self, meeting: Meeting, what: str, folder: object, state: Callable[[], Mapping[str, Any]]) -> None:
        self._meeting = meeting
        self._what = what
        self._error: Exception | None = None
        self._held: dict[str, Held] = {}
        self._values: Any = None
        self._part: Path | None = None
        reports: dict[str, Report] = {}
        try:
            self._folder = CheckpointFolder(folder)
            self._values = self._encoded(state())
            reports = {path: Report.of(held) for path, held in self._held.items()}
            if meeting.rank == 0:
                self._part = self._folder.begin()
        except Exception as error:
            self._error = self._told(error)
        digest = hash62(json.dumps(self._values))
        try:
            everybody = self._agree((reports, digest, self._part))
        except BaseException:
            self._remove()
            raise
        self._part = everybody[0][2]
        self._has_others = digest != everybody[0][1]
        self._shares = Shares({}, [], [])
        self._tensors: dict[Write, torch.Tensor] = {}
        try:
            self._shares = share([reported for reported, _, _ in everybody])
            self._tensors = {write: self._tensor(write) for write in self._shares.writes[meeting.rank]}
        except Exception as error:
            self._error = self._told(error)
        self._held.clear()

    def copy(self) -> None:
        """Take copies of what this rank writes, on the host: the step may go on."""
        try:
            copies = {write: torch.empty_like(tensor, device="cpu") for write, tensor in self._tensors.items()}
            for write, tensor in self._tensors.items():
                copies[write].copy_(tensor)
            self._tensors = copies
        except Exception as error:
            self._error = self._error or self._told(error)
        except BaseException:  # Ctrl-C
            self._remove()
            raise

    def write(self) -> None:
        """Write the files, and let the folder appear when all ranks have. May run in a thread of its own."""
        try:
            written = self._tried(self._written) if self._error is None else None
            everybody = self._agree((written, self._values if self._has_others else None))
            if self._meeting.rank == 0:
                self._tried(lambda: self._complete(*zip(*everybody, strict=True)))
            self._agree(None)
        except BaseException:  # Ctrl-C as well
            self._remove()
            raise

    def _encoded(self, state: Mapping[str, Any]) -> Any:
        names: dict[int, str] = {}  # a tensor that is tied has one name

        def leaf(path: str, value: Any) -> str | None:
            if not isinstance(value, Held):
                return None
            if id(value) not in names:
                while path in self._held:
                    path += "'"
                names[id(value)] = path
                self._held[path] = value
            return names[id(value)]

        return {name: encoded(each, name, leaf) for name, each in state.items()}

    def _tensor(self, write: Write) -> torch.Tensor:
        held = self._held[write.path]
        return next(view for box, view in held.place.boxes_of(held.tensor) if box.offsets == write.offsets)

    def _written(self) -> Any:
        assert self._part is not None, "the ranks have agreed"
        if not self._part.is_dir():
            raise CheckpointError(
                f"this rank does not see the folder {str(self._part)!r}, which rank 0 has made: give a folder that all "
                "ranks share, and to which no other program saves"
            )
        return _writer().write_share(self._part, self._shares, self._meeting.rank, self._tensors)

    def _complete(self, written: Any, values: Any) -> None:
        assert self._part is not None, "rank 0 has made it"
        tensors = _writer().write_metadata(self._part, self._shares, written)
        index = CheckpointIndex(
            torch=torch.__version__,
            world=self._meeting.size,
            tensors=tensors,
            files={name: each for rank in written for name, each in rank.files.items()},
            values=self._values,
            ranks=[{"values": own, "tensors": names} for own, names in zip(values, self._shares.names, strict=True)],
        )
        with (self._part / NAME).open("w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        self._folder.complete(self._part)

    def _agree(self, mine: Any) -> list[Any]:
        """What each rank has. If this or another one has failed, all raise."""
        return self._meeting.agree(self._what, self._error, mine)

    def _tried(self, act: Callable[[], Any]) -> Any:
        """What this gives; None after an error, which is told when the ranks meet."""
        try:
            return act()
        except Exception as error:
            self._error = self._told(error)
            return None

    def _remove(self) -> None:
        if self._meeting.rank == 0 and self._part is not None:
            self._folder.abandon(self._part)

    def _told(self, error: Exception) -> Exception:
        """An error of the system as one that says what to do."""
        if not isinstance(error, OSError):
            return error
        place = f" ({error.filename})" if error.filename else ""
        told = CheckpointError(
            f"{self._what} cannot write there: {error.strerror or error}{place}. Make room or give the right to write, "
            "or name another folder. A checkpoint that was there is as before"
        )
        told.__cause__ = error
        return told


def _writer() -> Any:
    """A module that is imported at the first save: torch.distributed.checkpoint takes a third of a second."""
    return import_module("commfuse_fx.checkpoints.tensor_writer")
