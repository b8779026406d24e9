"""Below what time no order of the same nodes can bring a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.simulate.rounds import Played


@dataclass(frozen=True)
class Bound:
    """A lower bound of the step time in seconds, and what it comes from.

    cause: "compute" | "communication on <group, or link that several groups share>" | "critical path".
    """

    seconds: float
    cause: str


def lower_bound(played: Played, dependence: Dependence | None) -> Bound:
    """The largest of four bounds; the first of equal ones.

    Compute: one core does all computing and the backend's host work. Communication: a group moves one message's
    worth at a time, and so does a link, in bursts too, since it has to earn them. Critical path:
    the longest chain of nodes that must come one after another; it says nothing of the period of steps that reach
    into each other, so nodes that run in the following step leave it out. `dependence` None leaves it out, too.
    """
    sent = [piece.transfer for pieces in played.pieces.values() for piece in pieces]
    computing = played.compute_seconds + sum(each.least_host for each in sent)
    found = [Bound(computing, "compute")]
    streams: dict[str, float] = {}
    links: dict[str, float] = {}
    for each in sent:
        streams[each.stream] = streams.get(each.stream, 0.0) + each.least_seconds
        for link in dict.fromkeys(each.links):
            links[link] = links.get(link, 0.0) + each.transfer
    found.extend(Bound(seconds, f"communication on {stream}") for stream, seconds in streams.items())
    found.extend(Bound(seconds, f"communication on {link}") for link, seconds in links.items())
    if dependence is not None and not played.deferred:
        found.append(Bound(_critical_path(played, dependence), "critical path"))
    best = found[0]
    for bound in found[1:]:
        if bound.seconds > best.seconds * (1 + 1e-12):  # sums in another order are not another bound
            best = bound
    return best


def _critical_path(played: Played, dependence: Dependence) -> float:
    done: dict[fx.Node, float] = {}
    released: dict[fx.Node, list[tuple[float, float]]] = {}  # start -> (when a piece can move, how long it takes)
    for node in played.order:
        ready = max((done[other] for other in dependence.direct[node]), default=0.0)
        if is_wait(node):
            ready = max(ready, _last_end(released.get(node.args[0], [])))  # type: ignore[arg-type]
        done[node] = ready + played.seconds.get(node, 0.0)
        for piece in played.pieces.get(node, ()):
            entry = (done[node] + piece.transfer.overlapped, piece.transfer.least_seconds)
            released.setdefault(piece.start, []).append(entry)
    return max(done.values(), default=0.0)


def _last_end(pieces: list[tuple[float, float]]) -> float:
    """When messages that leave one at a time, none before its release, have all arrived at the earliest."""
    end = 0.0
    for release, seconds in sorted(pieces):
        end = max(end, release) + seconds
    return end
