"""What is known when votes of the ranks have not come, and what it may come from."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.support.long_lists import shortened

_CLOSED = ("closed by peer", "reset by peer", "broken pipe", "connection refused")

NOTHING_DONE = "Nothing was updated"
"""How ranks are left that have lost others ahead of a step."""

_FEWER = "give all ranks as many batches (drop_last), or run the loop in the join() of a compiled module"


def explain_lost_votes(
    cause: str,
    silent: Sequence[int],
    waited: float,
    limit: float,
    own: str,
    told: Sequence[str],
    left: str = NOTHING_DONE,
) -> str:
    """Which votes have not come, why, and what to do.

    cause: what the backend has raised. silent: ranks without a vote; none if that is not known. waited: seconds.
    limit: the time-out. own: what this rank does instead of a step; "" for a step. told: what other ranks have said of
    themselves. left: how this rank is left.
    """
    names = ", ".join(shortened([str(rank) for rank in silent], 8, "{} others"))
    who = f"no vote has come from rank{'s' if len(silent) > 1 else ''} {names}" if silent else "votes have not come"
    of_them = "a rank" if not silent else "one of them" if len(silent) > 1 else "that rank"
    if cause.startswith("left the step"):
        said = f"{who} after {waited:.1f} s: another rank has left an earlier step between its collectives"
        advice = "its message stands below"
    elif any(each in cause.lower() for each in _CLOSED):
        said = (
            f"{who}, and the connection to {of_them} has closed after {waited:.1f} s: it has ended, or has destroyed "
            "its process group"
        )
        advice = f"its own output says why. If it had fewer batches, {_FEWER}"
    elif waited >= limit or "timed out" in cause.lower():
        said = f"{who} within {waited:.0f} s (the time-out is {limit:.0f} s), and no connection has closed"
        advice = (
            "a rank is stuck, or it does something else alone, such as an evaluation, save() or state_dict(): let all "
            f"ranks do it together, or make the time-out longer. If it had fewer batches, {_FEWER}"
        )
    else:
        said = f"{who} after {waited:.1f} s"
        advice = f"look at the output of all ranks. If one had fewer batches, {_FEWER}"
    mine = f" This rank has come to {own}, which all ranks do together." if own else ""
    theirs = "".join(f" {each}." for each in told)
    return f"{said}. {left}.{theirs}{mine} {advice[0].upper()}{advice[1:]}"
