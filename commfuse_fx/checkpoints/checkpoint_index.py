"""The index of a checkpoint: which tensors lie where in its files, and all values that are no tensors. A JSON file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.bounds import MOST_RANKS
from commfuse_fx.support.checks import check_int, check_text, show
from commfuse_fx.support.documents import Document, check_keys
from commfuse_fx.support.strict_json import check_object

NAME = "commfuse.json"
"""The index's file. It is written last: a folder without one holds no checkpoint."""

_KEYS = ("torch", "world", "tensors", "files", "values", "ranks", "crc32")


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file: `length` bytes from byte `at` on, as `torch.save` writes a tensor.

    In the JSON text it is a list of all these, with one number for each offset and size.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. boxes: they cover it, and do not overlap."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(Document, kind="checkpoint", fix="copy the folder again, or take another checkpoint"):
    """A checkpoint index says what a checkpoint holds.

    torch: the version that wrote it. world: the number of ranks.
    tensors: by name. files: size and CRC-32 of each, by name.
    values: what `encoded` has made of the state of rank 0.
    ranks: for each rank "values", None where they are those of rank 0, and "tensors", the names of its tensors where
        they differ from those in its values.
    """

    torch: str
    world: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, tuple[int, int]]
    values: Any
    ranks: Sequence[Mapping[str, Any]]

    def of_rank(self, rank: int, world: int) -> tuple[Any, Mapping[str, str]]:
        """What a rank in a world of this size goes on with: its own values, or in a world of another size rank 0's."""
        mine = self.ranks[rank if world == self.world else 0]
        return self.values if mine["values"] is None else mine["values"], mine["tensors"]

    def _body(self) -> Mapping[str, Any]:
        tensors = {
            name: {
                "shape": list(each.shape),
                "dtype": str(each.dtype).removeprefix("torch."),
                "boxes": [[*box.offsets, *box.sizes, box.file, box.at, box.length] for box in each.boxes],
            }
            for name, each in self.tensors.items()
        }
        files = {name: list(each) for name, each in self.files.items()}
        body = {
            "torch": self.torch,
            "world": self.world,
            "tensors": tensors,
            "files": files,
            "values": self.values,
            "ranks": [dict(each) for each in self.ranks],
        }
        return {**body, "crc32": _checksum(body)}

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> CheckpointIndex:
        check_keys(body, where, _KEYS)
        if body["crc32"] != _checksum({key: value for key, value in body.items() if key != "crc32"}):
            raise ConfigValueError(
                f"{where} has changed since it was written: copy it again, or take another checkpoint"
            )
        world = check_int(body["world"], f"{where}: world", 1, MOST_RANKS)
        files = {
            _checked_name(name, where): _sizes(each, 2, f"{where}: files.{name}")
            for name, each in check_object(body["files"], f"{where}: files").items()
        }
        tensors = {
            name: _tensor(each, files, f"{where}: tensors.{name}")
            for name, each in check_object(body["tensors"], f"{where}: tensors").items()
        }
        ranks = [_rank(each, tensors, f"{where}: ranks") for each in _list(body["ranks"], world, f"{where}: ranks")]
        version = check_text(body["torch"], f"{where}: torch", empty=True)
        sizes = {name: (each[0], each[1]) for name, each in files.items()}
        return cls(torch=version, world=world, tensors=tensors, files=sizes, values=body["values"], ranks=ranks)


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _checked_name(name: str, where: str) -> str:
    """The name of a file in the folder of the checkpoint, and of no other one."""
    if not name or name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise ConfigValueError(f"{where}: files has {show(name)}, which is no name of a file in this folder")
    return name


def _tensor(value: object, files: Mapping[str, object], where: str) -> StoredTensor:
    body = check_object(value, where)
    check_keys(body, where, ("shape", "dtype", "boxes"))
    shape = _sizes(body["shape"], None, f"{where}.shape")
    dtype = getattr(torch, check_text(body["dtype"], f"{where}.dtype"), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigValueError(
            f"{where}.dtype is {show(body['dtype'])}, which is no type of PyTorch {torch.__version__}"
        )
    boxes = []
    for each in _list(body["boxes"], None, f"{where}.boxes"):
        *numbers, file, at, length = _list(each, 2 * len(shape) + 3, f"{where}.boxes")
        if not isinstance(file, str) or file not in files:
            raise ConfigValueError(f"{where}.boxes names {show(file)}, which is none of its files")
        place = f"{where}.boxes"
        sides = _sizes([*numbers, at, length], None, place)
        box = StoredBox(sides[: len(shape)], sides[len(shape) : -2], file, *sides[-2:])
        if any(o + s > whole for o, s, whole in zip(box.offsets, box.sizes, shape, strict=True)):
            raise ConfigValueError(f"{place} has {show(each)}, which is not within {list(shape)}")
        boxes.append(box)
    return StoredTensor(shape, dtype, tuple(boxes))


def _rank(value: object, tensors: Mapping[str, object], where: str) -> dict[str, Any]:
    body = check_object(value, where)
    check_keys(body, where, ("values", "tensors"))
    for name in check_object(body["tensors"], f"{where}.tensors").values():
        if not isinstance(name, str) or name not in tensors:
            raise ConfigValueError(f"{where}.tensors names {show(name)}, which is none of the tensors")
    return body


def _sizes(value: object, count: int | None, where: str) -> tuple[int, ...]:
    return tuple(check_int(each, where, 0) for each in _list(value, count, where))


def _list(value: object, count: int | None, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigTypeError(f"{where} is {show(value)}; give a list")
    if count is not None and len(value) != count:
        raise ConfigValueError(f"{where} is {show(value)}; give a list of {count}")
    return value
