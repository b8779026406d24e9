"""Watch torch's random generators while a model is traced, and refuse forwards that seed one.

A trace draws no random numbers, so generators stay where they are. Each generator that the trace meets gets a seed of
its own, and a new one after every draw. If it has another seed at the next check, the model has seeded it or has set
an earlier state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commfuse_fx.errors import CaptureError

_FIRST_SEED = 0x5EED_C0FF_EE00_0000

SEEDED = (
    "the model seeds the random generator or sets its state in forward, which a compiled step cannot repeat: seed "
    "before the step"
)


@dataclass
class _Watched:
    generator: torch.Generator
    label: str
    state: torch.Tensor
    seed: int


class Generators:
    """The random generators that existed before a trace, with their states."""

    def __init__(self) -> None:
        self.is_divided = False  # whether ranks divide the graph, and draw the same numbers
        self._watched: dict[int, _Watched] = {}
        self._next = _FIRST_SEED

    def watch_defaults(self) -> None:
        """Watch torch's default generators."""
        self.watch(torch.default_generator, "")
        if torch.cuda.is_initialized():
            for generator in torch.cuda.default_generators:
                self.watch(generator, "")

    def watch(self, generator: torch.Generator, label: str) -> None:
        """Watch a generator from now on. label: where it was found; empty for a default generator."""
        if _key(generator) in self._watched:
            return
        with _disable_current_modes():
            state = generator.get_state()
        self._watched[_key(generator)] = watched = _Watched(generator, label, state, 0)
        self._stamp(watched)

    def check(self) -> None:
        """Raises CaptureError if any generator has been seeded, or set to another state, since the last check."""
        for watched in self._watched.values():
            if watched.generator.initial_seed() != watched.seed:
                raise CaptureError(
                    SEEDED
                    if not watched.label
                    else f"the model seeds {watched.label} or sets its state in forward, which a compiled step cannot "
                    "repeat: seed it before the step, where it is made"
                )

    def drawn_from(self, generator: Any) -> None:
        """Note that an op draws from a generator (None: a default one).

        Raises CaptureError for a generator that did not exist before the trace, or that divided ranks cannot share.
        """
        if generator is None:
            for watched in self._watched.values():
                if not watched.label:
                    self._stamp(watched)
            return
        watched_one = self._watched.get(_key(generator))
        if watched_one is None:
            raise CaptureError(
                "the model draws from a torch.Generator that it makes in forward, or that it reaches neither through "
                "its attributes nor through globals of its methods: a compiled step runs no Python code, so it cannot "
                "make or seed one in every step. Keep the generator as an attribute of the module and seed it before "
                "the step: it then goes on from step to step"
            )
        if self.is_divided:
            raise CaptureError(
                f"the model draws from a generator of its own ({watched_one.label}), where ranks that divide a step "
                "have to draw the same numbers: leave generator= out, and torch.manual_seed decides"
            )
        self._stamp(watched_one)

    def restore(self) -> None:
        """Set all generators back to their states before the trace."""
        for watched in self._watched.values():
            watched.generator.set_state(watched.state)
        self._watched.clear()

    def initial_seed(self) -> int:
        """The value that torch.initial_seed() has outside of the trace."""
        watched = self._watched.get(_key(torch.default_generator))
        if watched is None:
            return torch.default_generator.initial_seed()
        with _disable_current_modes():
            own = torch.Generator()
            own.set_state(watched.state)
        return own.initial_seed()

    def _stamp(self, watched: _Watched) -> None:
        self._next += 1
        watched.seed = self._next
        watched.generator.manual_seed(self._next)


def _key(generator: Any) -> int:
    """A key that is equal for all Python objects of one generator: ops get another object than the user has."""
    key: int = generator._cdata
    return key
