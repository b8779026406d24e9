"""The plans that a search of strategies has compared, and how parameters lie in the one that was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import in_bytes
from commfuse_fx.inspect.explain.parameter_groups import WHOLE, ParameterGroup, parameter_groups
from commfuse_fx.inspect.explain.table import aligned
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.variants.attempts import Attempt
from commfuse_fx.planning.variants.plan_names import is_data_parallel, plan_name
from commfuse_fx.simulate.simulation import simulate

FROM_FILE = "strategy file"

_HEAD = ("", "mesh", "priced ms", "step ms", "exposed ms", "peak", "sent", "plan")
_TO_THE_RIGHT = ("priced ms", "step ms", "exposed ms", "peak")


@dataclass(frozen=True)
class StrategyRow:
    """A plan that was made.

    plan: the search that has found it. mesh: such as "dp=8".
    search_seconds: what the search has priced the step at; None where nothing was searched.
    step_seconds, exposed_seconds, peak_memory: as in `Simulation`.
    sent: bytes of payload of the collectives, by kind.
    chosen: whether the step has this plan.
    """

    plan: str
    mesh: str
    search_seconds: float | None
    step_seconds: float
    exposed_seconds: float
    peak_memory: int
    sent: dict[str, int]
    chosen: bool


@dataclass(frozen=True)
class TooLargePlan:
    """A plan that does not fit. needed: bytes per rank that it takes at least."""

    plan: str
    needed: int


@dataclass(frozen=True)
class StrategyTable:
    """The plans of one step.

    rows: those that were made, the fastest first; of plans with the same strategies the fastest.
    too_large: those that do not fit into memory.
    layouts: how parameters lie in the chosen plan.
    notes: what the search says of it.
    """

    rows: tuple[StrategyRow, ...]
    too_large: tuple[TooLargePlan, ...]
    layouts: tuple[ParameterGroup, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The same for people."""
        lines: list[str] = []
        if self.rows:
            rows = [
                (
                    "*" if row.chosen else "",
                    row.mesh,
                    "" if row.search_seconds is None else f"{row.search_seconds * 1e3:.3f}",
                    f"{row.step_seconds * 1e3:.3f}",
                    f"{row.exposed_seconds * 1e3:.3f}",
                    in_bytes(row.peak_memory),
                    ", ".join(f"{kind} {in_bytes(count)}" for kind, count in row.sent.items()) or "nothing",
                    row.plan,
                )
                for row in self.rows
            ]
            lines += aligned((_HEAD, *rows), _TO_THE_RIGHT).splitlines()
        lines += (f"does not fit: {each.plan}, needs {in_bytes(each.needed)}" for each in self.too_large)
        lines += self.notes
        if self.layouts:
            lines.append("parameters of the chosen plan")
            grouped = [("", str(each), each.layout) for each in self.layouts if each.layout != WHOLE]
            whole = sum(each.count for each in self.layouts if each.layout == WHOLE)
            rest = [("", f"all {'others ' if grouped else ''}({whole})", WHOLE)] if whole else []
            lines += aligned((("", "name", "layout"), *grouped, *rest)).splitlines()[1:]
        return "\n".join(lines) + "\n"


def strategy_table(made: Sequence[Attempt], chosen: Program | None, costs: CostModel, from_file: bool) -> StrategyTable:
    """Simulate the plans that were made and put them in order.

    chosen: the final program; None where nothing fits. from_file: strategies were read, not searched.
    """
    found: dict[object, tuple[bool, float, str, Program]] = {}
    too_large: dict[str, TooLargePlan] = {}
    for each in made:
        plan, program = _found_by(each, from_file), each.program
        if program is None:
            needed = min(each.needed, too_large[plan].needed if plan in too_large else each.needed)
            too_large[plan] = TooLargePlan(plan, needed)
            continue
        this, key = (program is not chosen, each.seconds or 0.0, plan, program), _strategies(program)
        found[key] = min(found.get(key, this), this, key=lambda one: one[:2])
    rows = [_row(plan, program, not is_other, costs) for is_other, _, plan, program in found.values()]
    return StrategyTable(
        tuple(sorted(rows, key=lambda row: row.step_seconds)),
        tuple(too_large.values()),
        () if chosen is None else tuple(parameter_groups(chosen.params)),
        ()
        if chosen is None
        else tuple(f"{n.topic}: {n.subject}: {n.reason}" for n in chosen.notes if n.topic == "search"),
    )


def _found_by(made: Attempt, from_file: bool) -> str:
    return FROM_FILE if from_file and not is_data_parallel(made) else plan_name(made)


def _row(plan: str, program: Program, chosen: bool, costs: CostModel) -> StrategyRow:
    simulation = simulate(program, costs)
    sent: Counter[str] = Counter()
    for node in program.collectives():
        details = collective_of(node)
        sent[details.kind] += details.nbytes
    return StrategyRow(
        plan,
        str(program.mesh),
        program.search_seconds,
        simulation.step_seconds,
        simulation.exposed_seconds,
        simulation.peak_memory,
        dict(sorted(sent.items())),
        chosen,
    )


def _strategies(program: Program) -> object:
    """What makes plans differ for people: how ops and parameters lie, not how collectives are fused."""
    layouts = tuple((name, param.layout, param.shard, param.owner) for name, param in program.params.items())
    return program.strategies and program.strategies.to_json(), layouts
