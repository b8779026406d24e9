"""One half of a program, whose code is made when it first runs: many forwards run a backward of another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commfuse_fx.runtime.execute.code.generated_code import Code
from commfuse_fx.runtime.execute.code.recorded import LayoutCheck


class Half:
    """The forward or the backward of a program. The layouts of its results are looked at until it has run once.

    code: None until it first runs.
    """

    def __init__(
        self, name: str, make_check: Callable[[], LayoutCheck], generate: Callable[[str, LayoutCheck], Code]
    ) -> None:
        self.code: Code | None = None
        self._name = name
        self._check: LayoutCheck | None = None
        self._make_check = make_check
        self._generate = generate

    def run(self, given: list[Any]) -> Any:
        """Run it, as `codegen_of_halves` says. Call `has_run` when it is over."""
        if self.code is None:
            self._check = self._make_check()
            self.code = self._generate(self._name, self._check)
        return self.code.namespace[self._name](given)

    @property
    def is_known(self) -> bool:
        """Whether it has run, and its layouts need not be looked at."""
        return self.code is not None and self._check is None

    def has_run(self) -> None:
        """Take out what has turned out needless."""
        if self._check is not None:
            assert self.code is not None
            self.code = self.code.without(self._check.needless())
            self._check = None
