"""Random numbers of Python and numpy that a model draws while it is traced: each becomes a constant of the graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from commfuse_fx.capture.guards.numpy_types import GLOBAL_GENERATOR
from commfuse_fx.capture.torch_parts.this_thread import patched_here

_READING = ("getstate", "get_state")


class PythonNumbers:
    """Notes where the model draws random numbers of Python and numpy.

    found: texts such as "numpy.random in block at file:line", in order.
    where: a function that gives the module and the line of the code that runs.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.found: dict[str, None] = {}
        self._where = where
        self._states: dict[int, tuple[Any, str, Callable[[], str]]] = {}
        self._before: dict[int, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the `with` block, notice when the model draws numbers."""
        known: list[tuple[ModuleType, Any, str]] = [(random, random._inst, "Python's random")]
        if GLOBAL_GENERATOR is not None:
            known.append((*GLOBAL_GENERATOR, "numpy.random"))
        with ExitStack() as stack:
            for module, owner, what in known:
                self.watch(owner, what)
                for name, function in list(vars(module).items()):
                    if getattr(function, "__self__", None) is owner and name not in _READING:
                        stack.enter_context(patched_here(module, name, self._telling(function, what)))
            yield
            self.check(self._where())

    def watch(self, generator: Any, label: str) -> None:
        """Watch a generator of Python or numpy from now on. label: where it was found."""
        if id(generator) not in self._states:
            state = _state_of(generator)
            self._states[id(generator)] = (generator, label, state)
            self._before[id(generator)] = state()

    def check(self, where: str) -> None:
        """Note the generators that have drawn since the last check, by code that ran somewhere in `where`."""
        for key, (_, label, state) in self._states.items():
            now = state()
            if now != self._before[key]:
                self._before[key] = now
                self.found.setdefault(f"{label} {where}")

    def _telling(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            self.found.setdefault(f"{what} {self._where()}")
            try:
                return function(*args, **kwargs)
            finally:
                for key, (generator, _, state) in self._states.items():
                    if generator is getattr(function, "__self__", None):
                        self._before[key] = state()

        return tell


def _state_of(generator: Any) -> Callable[[], str]:
    if isinstance(generator, random.Random):
        return lambda: str(hash(generator.getstate()))
    if hasattr(generator, "bit_generator"):  # numpy's newer kind
        return lambda: str(generator.bit_generator.state)
    return lambda: str([part.tobytes() if hasattr(part, "tobytes") else part for part in generator.get_state()])
