"""Temporarily patch classes so that reads and writes of their instances' attributes are reported."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
_MARK = "_commfuse_takes_notes"
FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "commfuse_fx"}

_PLAIN = (argparse.Namespace, UserDict, UserList, ChainMap)
"""Classes of the standard library that only hold values, in attributes."""

_active = threading.local()
_lock = threading.Lock()
_originals: dict[type, dict[str, Any]] = {}
_users = 0


class Notes(Protocol):
    """Receives a report of each read and write."""

    def got(self, owner: Any, name: str, value: Any) -> None:
        """The attribute `name` of `owner` was read, and had this value."""

    def missed(self, owner: Any, name: str) -> None:
        """The attribute `name` of `owner` was read, but does not exist."""

    def wrote(self, owner: Any, name: str) -> None:
        """The attribute `name` of `owner` is about to be set."""

    def deleted(self, owner: Any, name: str) -> None:
        """The attribute `name` of `owner` is about to be deleted."""


@contextmanager
def taking_notes(notes: Notes, *classes: type) -> Iterator[None]:
    """Inside the `with` block, report this thread's reads and writes of instances of `classes` to `notes`.

    `noted` adds more classes meanwhile. When the last block ends, all classes are as they were before.
    """
    global _users
    with _lock:
        _users += 1
    before, _active.notes = getattr(_active, "notes", None), notes
    try:
        for cls in classes:
            noted(cls)
        yield
    finally:
        _active.notes = before
        with _lock:
            _users -= 1
            if not _users:
                _restore()


def can_be_noted(cls: type) -> bool:
    """Whether this is a Python class of the user: not built-in, and not of torch, numpy or the standard library."""
    flags = cls.__flags__
    if not flags & _HEAP_TYPE or flags & _IMMUTABLE_TYPE:
        return False
    return issubclass(cls, _PLAIN) or str(cls.__module__).partition(".")[0] not in FOREIGN


def noted(cls: type) -> None:
    """Report reads and writes of instances of this class too, from now on."""
    with _lock:
        if cls in _originals or not _users:
            return
        kept = {name: vars(cls)[name] for name in _TELLING if name in vars(cls)}
        _originals[cls] = kept
        try:
            for name, telling in _TELLING.items():
                if not hasattr(getattr(cls, name), _MARK):
                    setattr(cls, name, telling(getattr(cls, name)))
        except (TypeError, AttributeError):  # its metaclass does not allow it
            _restore_one(cls, _originals.pop(cls))


def _restore() -> None:
    for cls, kept in _originals.items():
        _restore_one(cls, kept)
    _originals.clear()


def _restore_one(cls: type, kept: dict[str, Any]) -> None:
    for name in _TELLING:
        if name in kept:
            setattr(cls, name, kept[name])
        elif hasattr(vars(cls).get(name), _MARK):
            delattr(cls, name)


def _telling_reads(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        notes: Notes | None = getattr(_active, "notes", None)
        if notes is None:
            return original(self, name)
        try:
            value = original(self, name)
        except AttributeError:
            notes.missed(self, name)
            raise
        notes.got(self, name, value)
        return value

    setattr(__getattribute__, _MARK, True)
    return __getattribute__


def _telling_writes(original: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        notes: Notes | None = getattr(_active, "notes", None)
        if notes is not None:
            notes.wrote(self, name)
        original(self, name, value)

    setattr(__setattr__, _MARK, True)
    return __setattr__


def _telling_deletions(original: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    def __delattr__(self: Any, name: str) -> None:
        notes: Notes | None = getattr(_active, "notes", None)
        if notes is not None:
            notes.deleted(self, name)
        original(self, name)

    setattr(__delattr__, _MARK, True)
    return __delattr__


_TELLING: Mapping[str, Callable[[Any], Any]] = {
    "__getattribute__": _telling_reads,
    "__setattr__": _telling_writes,
    "__delattr__": _telling_deletions,
}
