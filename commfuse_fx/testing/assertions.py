"""Assert which collectives a compiled step runs."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.ir.core.meta import PHASES, dtype_name
from commfuse_fx.planning.compiled import Collective
from commfuse_fx.support.checks import check_choice, check_int
from commfuse_fx.support.long_lists import shortened
from commfuse_fx.testing.check_lowered import check_lowered

_LISTED = 20
_MEMBERS = 4


def assert_collectives(
    lowered: Lowered,
    *,
    all_reduce: int | None = None,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    broadcast: int | None = None,
    all_to_all: int | None = None,
    reduce: int | None = None,
    total: int | None = None,
    max_bytes: int | None = None,
    phase: str | None = None,
) -> None:
    """Assert how many collectives the final graph has.

    all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce: how many of that kind. None: not looked at.
    total: how many of all kinds together. None: not looked at.
    max_bytes: what the payloads (bytes of the full, unsharded buffers) of all collectives may add up to.
    phase: "forward", "backward" or "update": only collectives of that phase count, for all other arguments.

    Raises AssertionError, which lists the collectives found. Raises ConfigTypeError or ConfigValueError for a
    bad argument, and where nothing is expected.
    """
    __tracebackhide__ = True
    where = "assert_collectives"
    check_lowered(lowered, where)
    kinds = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "broadcast": broadcast,
        "all_to_all": all_to_all,
        "reduce": reduce,
    }
    expected = {kind: check_int(count, f"{where}: {kind}", 0) for kind, count in kinds.items() if count is not None}
    if total is not None:
        check_int(total, f"{where}: total", 0)
    if max_bytes is not None:
        check_int(max_bytes, f"{where}: max_bytes", 0)
    if phase is not None:
        check_choice(phase, f"{where}: phase", PHASES[1:])
    if not expected and total is None and max_bytes is None:
        raise ConfigValueError(
            f"{where} was given nothing to expect; give all_reduce=, another kind, total= or max_bytes="
        )
    found = [each for each in lowered.collectives if phase in (None, each.phase)]
    wrong = []
    for kind, count in expected.items():
        have = sum(each.kind == kind for each in found)
        if have != count:
            wrong.append(f"{kind}: {have} found, {count} expected")
    if total is not None and len(found) != total:
        wrong.append(f"collectives in total: {len(found)} found, {total} expected")
    payload = sum(each.bytes for each in found)
    if max_bytes is not None and payload > max_bytes:
        wrong.append(f"payload: {payload} bytes found, at most {max_bytes} expected")
    if wrong:
        raise AssertionError("\n".join([*wrong, *_listing(found, phase)]))


def _listing(found: Sequence[Collective], phase: str | None) -> list[str]:
    scope = "" if phase is None else f" in phase {phase}"
    title = f"{len(found)} collective(s) found{scope}{':' if found else ''}"
    return [title, *shortened([f"  {_line(each)}" for each in found], _LISTED, "  ... and {} more")]


def _line(each: Collective) -> str:
    members = each.members[:_MEMBERS]
    if len(each.members) > _MEMBERS:
        members = [*members, f"... {len(each.members)}"]
    return (
        f"{each.kind} over {len(each.group)} rank(s), {each.bytes} bytes of {dtype_name(each.dtype)} in {each.phase}: "
        f"{', '.join(members)}"
    )
