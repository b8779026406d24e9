"""Simulate one training step: play its graph on a cluster, and say where the time goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import in_ms
from commfuse_fx.ir.core.collectives import collective_of, is_wait
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import collective_text
from commfuse_fx.simulate.bound import lower_bound
from commfuse_fx.simulate.events import Event, SimulatedCollective
from commfuse_fx.simulate.reasons import Reasons
from commfuse_fx.simulate.rounds import Played, play
from commfuse_fx.simulate.trace_export import chrome_trace
from commfuse_fx.support.gc_pause import no_garbage_collection

COMPUTE_STREAM = "compute"

# Sums of the same times in different orders differ by less than this part.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Simulation:
    """A simulation is one predicted step. Times are seconds, memory is bytes.

    step_seconds: how long the step takes.
    compute_seconds: all nodes and the handing over of transfers, with nothing on the wire.
    exposed_seconds: how long the step stands still in waits.
    bound_seconds: the step time that no order of the same nodes can beat.
    bound_by: what that bound comes from.
    peak_memory: the most that is allocated at one time.
    events: what every stream does, in the order of time.
    collectives: each collective, in the order of their waits.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bound_seconds: float
    bound_by: str
    peak_memory: int
    events: tuple[Event, ...]
    collectives: tuple[SimulatedCollective, ...]

    @property
    def gap(self) -> float:
        """How far the step is above its lower bound: 0.1 is 10 % longer."""
        above = self.step_seconds / self.bound_seconds - 1.0 if self.bound_seconds else 0.0
        return above if abs(above) > _ROUNDING else 0.0

    def text(self) -> str:
        """A report in plain lines."""
        lines = [
            f"simulated step: {in_ms(self.step_seconds)}, {self.gap:.1%} above its lower bound of "
            f"{in_ms(self.bound_seconds)} ({self.bound_by})",
            f"  compute {in_ms(self.compute_seconds)}, exposed communication {in_ms(self.exposed_seconds)}, "
            f"peak memory {self.peak_memory / 2**20:.1f} MiB",
            f"{len(self.collectives)} collective(s)",
        ]
        for each in self.collectives:
            reason = f" ({each.reason})" if each.reason else ""
            lines.append(
                f"  {each.name}: issued {in_ms(each.issued)}, on the wire {in_ms(each.begin)} to {in_ms(each.end)}, "
                f"waited for at {in_ms(each.wait_entered)}; {in_ms(each.hidden)} hidden, "
                f"{in_ms(each.exposed)} exposed{reason}; {each.description}"
            )
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """All fields, the gap included, as dictionaries and lists."""
        return {**asdict(self), "gap": self.gap}

    def chrome_trace(self) -> str:
        """The step in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return chrome_trace(self.events, self.collectives)

    def save_chrome_trace(self, path: str | Path) -> Path:
        """Write `chrome_trace()` to a file, replacing it. Returns its path."""
        path = Path(path)
        path.write_text(self.chrome_trace())
        return path


@no_garbage_collection()
def simulate(program: Program, model: CostModel, steps: int | None = None) -> Simulation:
    """Play a step of `program` and report on it.

    model: the prices, from `cost_model`.
    steps: how many to play, the last of which is reported. None: one, or four where nodes run in the following
        step; such programs go on until one step is as long as the next.

    Raises ConfigValueError for fewer than one step, VerificationError for a graph that cannot be played.
    """
    played = play(program, model, steps)
    dependence = Dependence(program.graph, program.aliases())
    bound = lower_bound(played, dependence)
    reasons = Reasons(program, played, dependence)
    collectives = tuple(_collective(program, played, start, reasons.of(start)) for start in played.flown)
    return Simulation(
        step_seconds=played.ended - played.began,
        compute_seconds=played.compute_seconds,
        exposed_seconds=sum(each.exposed for each in collectives),
        bound_seconds=bound.seconds,
        bound_by=bound.cause,
        peak_memory=peak_memory(program, dependence.roots),
        events=(*_compute_events(played), *_issue_events(played), *_wait_events(played), *_transfer_events(played)),
        collectives=collectives,
    )


def _collective(program: Program, played: Played, start: fx.Node, reason: str) -> SimulatedCollective:
    details = collective_of(start)
    flown, zero = played.flown[start], played.began
    times = [played.engine.times(handle) for handle in flown.handles]
    issued = min(issued for issued, _, _ in times)
    end = max(end for _, _, end in times)
    return SimulatedCollective(
        name=info(start).name,
        issued=issued - zero,
        begin=min(begin for _, begin, _ in times) - zero,
        end=end - zero,
        wait_entered=flown.wait_entered - zero,
        wait_left=flown.wait_left - zero,
        seconds=sum(end - begin for _, begin, end in times),
        hidden=min(end, flown.wait_entered) - issued,
        exposed=flown.wait_left - flown.wait_entered,
        reason=reason,
        description=f"{details.kind} {collective_text(details, program.mesh.size(details.group))}",
    )


def _compute_events(played: Played) -> list[Event]:
    zero = played.began
    events: list[Event] = []
    names: dict[Any, str] = {}
    for node, begin, end in played.computed:
        details = info(node)
        name = names.get(node.target)
        if name is None:
            name = names[node.target] = op_name(node.target)
        events.append(Event(name, "compute", COMPUTE_STREAM, begin - zero, end - zero, details.name, details.phase))
    return events


def _issue_events(played: Played) -> list[Event]:
    zero = played.began
    counts = Counter(piece.start for pieces in played.pieces.values() for piece in pieces)
    events: list[Event] = []
    for start, number, begin, end in played.issued:
        details = info(start)
        name = f"issue {_transfer_name(details.name, number, counts[start])}"
        events.append(Event(name, "issue", COMPUTE_STREAM, begin - zero, end - zero, details.name, details.phase))
    return events


def _wait_events(played: Played) -> list[Event]:
    zero = played.began
    waits = {node.args[0]: node for node in played.order if is_wait(node)}
    events: list[Event] = []
    for start, flown in played.flown.items():
        wait = info(waits[start])
        begin, end = flown.wait_entered - zero, flown.wait_left - zero
        events.append(Event(f"wait for {info(start).name}", "wait", COMPUTE_STREAM, begin, end, wait.name, wait.phase))
    return events


def _transfer_events(played: Played) -> list[Event]:
    zero = played.began
    events: list[Event] = []
    for start, flown in played.flown.items():
        details = info(start)
        for number, handle in enumerate(flown.handles):
            name = _transfer_name(details.name, number, len(flown.handles))
            issued, begin, end = (time - zero for time in played.engine.times(handle))
            group = collective_of(start).group
            events.append(Event(name, "communication", group, begin, end, details.name, details.phase, issued))
    return sorted(events, key=lambda event: (event.stream, event.begin))


def _transfer_name(collective: str, number: int, count: int) -> str:
    """A collective that is one transfer lends it its name; pieces are numbered."""
    return collective if count == 1 else f"{collective}.{number}"
