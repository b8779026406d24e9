"""Assert what a pass makes of a program, both written as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from commfuse_fx.errors import ConfigTypeError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.text.parse_text import parse_program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.declaration import PassContext, PricedPass
from commfuse_fx.support.checks import show


def assert_pass(before: str | Program, apply: Callable[[Program], bool], after: str | None) -> Program:
    """Assert that a pass turns one program into another, and return the one that it has made.

    before: canonical text, of which the header may be left out, or a program that `parse_program` has read; it
        is not changed.
    apply: the pass; it returns whether it has changed anything. One that asks what things cost gets the prices
        of the cluster in the header, such as `# cluster: gloo-1gbit`.
    after: the lines that the program has then, without header and in any indentation. None: the pass changes
        nothing.

    Raises AssertionError with the lines that differ, or where the pass says something else than what it did.
    Raises VerificationError where its result is no valid program, and ConfigValueError where `before` cannot be
    read.
    """
    __tracebackhide__ = True
    if not callable(apply):
        raise ConfigTypeError(f"assert_pass: apply is {show(apply)}; give a pass, such as Simplify()")
    program = parse_program(before) if isinstance(before, str) else before.copy()
    name = str(getattr(apply, "name", apply))
    had = program_lines(program)
    if isinstance(apply, PricedPass):
        changed = apply(program, PassContext.of(program.config))
    else:
        changed = apply(program)
    verify(program, name)
    found = program_lines(program)
    wanted = had if after is None else [line.strip() for line in after.splitlines() if line.strip()]
    if found != wanted:
        lines = difflib.unified_diff(wanted, found, "expected", f"after {name}", n=1, lineterm="")
        raise AssertionError("\n".join([f"pass {name} makes another program than expected", *lines]))
    if changed != (after is not None):
        raise AssertionError(f"pass {name} returned {changed!r}, and {'nothing' if after is None else 'lines'} changed")
    return program


def program_lines(program: Program) -> list[str]:
    """The canonical text of a program without its header."""
    return [line for line in canonical_text(program).splitlines() if not line.startswith("#")]
