"""Tracing patches parts of torch: one trace runs at a time, and other threads see the original functions."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class _Lock:
    """The lock of the thread that traces. A fork takes it too, so that a child never inherits patches of a trace."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self.take, after_in_parent=self.give, after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()

    def take(self) -> None:
        self.lock.acquire()

    def give(self) -> None:
        self.lock.release()


_tracing = _Lock()


@contextmanager
def one_trace_at_a_time() -> Iterator[None]:
    """Inside the `with` block no other thread can trace."""
    with _tracing.lock:
        yield


class _Patch:
    """An attribute that has another value while this is open. A trace opens a hundred of them."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._held = vars(self._owner).get(self._name, self)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        if self._held is self:  # it was inherited
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._held)


def patched_here(owner: Any, name: str, replacement: Callable[..., Any]) -> AbstractContextManager[None]:
    """Like `unittest.mock.patch.object` for a function, except that other threads still call the original."""
    original, thread = getattr(owner, name), threading.get_ident()

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return _Patch(owner, name, chosen)


class ValueHere:
    """A class attribute that has one value in the thread that makes it and another one elsewhere."""

    def __init__(self, here: Any, elsewhere: Any) -> None:
        self._thread = threading.get_ident()
        self._here = here
        self._elsewhere = elsewhere

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._here if threading.get_ident() == self._thread else self._elsewhere
