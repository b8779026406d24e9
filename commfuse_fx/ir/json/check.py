"""Whether a program that was read from a file is one that a compile could have saved.

Why: docs/decisions.md, "A graph in a file is data, and verifies".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commfuse_fx.errors import ConfigValueError, VerificationError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.json.write import to_dict


def check_saved(program: Program, data: Mapping[str, Any], where: str) -> None:
    """A file must be what its own program would be saved as, and hold what is true of every program."""
    unknown = next((name for name in _names_of_parameters(program) if name not in program.params), None)
    if unknown is not None:
        raise ConfigValueError(f"{where}: there is no parameter {unknown[:80]!r}; write the dump again")
    owners = [source.owner for source in program.sources.values()]
    if max(owners, default=-1) >= len(program.updates):
        raise ConfigValueError(f"{where}: there is no update {max(owners)}; write the dump again")
    try:
        verify(program, "reading")
        again = to_dict(program)
    except VerificationError as error:
        problem = str(error).removeprefix("after pass reading: ")
        raise ConfigValueError(f"{where}: {problem}; write the dump again") from None
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError) as error:
        # Metadata that does not fit the nodes.
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ConfigValueError(
            f"{where}: nodes and program contradict each other ({reason}); write the dump again"
        ) from (error)
    place = _difference(again, {key: data.get(key) for key in again}, "")
    if place is not None:
        raise ConfigValueError(f"{where}, {place}: this is not what the rest of the file says; write the dump again")


def _names_of_parameters(program: Program) -> Iterator[str]:
    """Of those that are to be parameters."""
    yield from program.grads
    yield from (source.name for source in program.sources.values() if source.kind == "parameter")
    for update in program.updates:
        for segment in update.segments:
            yield from (name for name, _ in segment.members)
    for group in program.optimizer.groups if program.optimizer is not None else ():
        yield from group.params


def _difference(wanted: Any, found: Any, place: str) -> str | None:
    """Where two documents begin to differ."""
    if type(wanted) is not type(found):
        return place
    if isinstance(wanted, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            where = f"{place}.{key[:80]}" if place else key
            if key not in wanted or key not in found:
                return where
            if (inner := _difference(wanted[key], found[key], where)) is not None:
                return inner
        return None if list(wanted) == list(found) else place
    if isinstance(wanted, list):
        if len(wanted) != len(found):
            return place
        pairs = enumerate(zip(wanted, found, strict=True))
        return next((p for i, (a, b) in pairs if (p := _difference(a, b, f"{place}[{i}]")) is not None), None)
    return None if wanted == found else place
