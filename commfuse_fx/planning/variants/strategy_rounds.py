"""A search of strategies in rounds: what was planned whole and simulated says what is searched for next.

First comes a memory limit. A plan that does not fit says by how much, and that is what the next search has to save.
Then come prices: a simulated plan says which part of its communication is exposed, and the next search counts no more
than that, until a strategy comes again.

Why: docs/decisions.md, "The search of `auto` is exact on one axis, and whole plans decide between searches".
Why: docs/decisions.md, "Levels of the parallel optimizer are plans of their own in a search".
Why: docs/decisions.md, "A search under a memory limit saves what a plan is too large by".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from commfuse_fx.config.parallel_optimizer import GRADIENTS, PARAMETERS, STATES
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import in_ms
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Situation, Variant
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.variants.attempts import Attempt
from commfuse_fx.planning.variants.plan_names import plan_name
from commfuse_fx.sharding.search.exposure import exposure_of
from commfuse_fx.simulate.rounds import play

SAVINGS = 2
"""Searches for strategies that take less memory, on each level of the parallel optimizer."""

PARTS = (0.125, 0.25, 0.5, 1.0)
"""What to save where nothing fits with what is missing, as parts of what the plan needs: the same for all limits."""

SHOWN = 5
"""Plans whose figures are noted."""

COMPARED = "plans of the search"
"""Topic of the notes that have them."""

GO_ON = 2
"""Plans of a round that the next one begins with."""

ALTERNATIONS = 4
"""Rounds of searches with the prices of simulated plans."""


def has_rounds(situation: Situation, program: Program, first: Sequence[Variant]) -> bool:
    """Whether these variants are the first ones of a search in rounds."""
    is_open = program.strategies is None and program.layouts is None
    is_open = is_open and not situation.config.propagates
    return situation.searches and is_open and len(first) > 1 and program.mesh.world > 1


def _by_use(level: int) -> tuple[bool, int]:
    """Levels in the order in which they are tried: that of gradients last, as it may not be needed."""
    return level == GRADIENTS, level


class StrategyRounds:
    """The rounds of one compile.

    first: the variants that are planned first. build: the pipeline of a variant. most: plans that are made in all.
    """

    def __init__(
        self,
        situation: Situation,
        program: Program,
        first: Sequence[Variant],
        build: Callable[[Variant], PassPipeline],
        costs: CostModel,
        most: int,
    ) -> None:
        self._build, self._costs, self._most = build, costs, most
        self._limit = situation.config.memory_limit
        self._levels = situation.free_levels(program)
        self._made: dict[Variant, Attempt] = {}
        self._search = first[0]
        self.first = [*map(build, first)]
        plain = self._search.but(searched=False)
        self.soonest = first.index(plain) if plain in first else 0
        """The number of the one without a search: what an interrupt can take while the others are searched for."""
        self._rounds = self._all_rounds()

    def __call__(self, attempts: Sequence[Attempt]) -> list[PassPipeline]:
        """What to plan next, by what was planned."""
        self._made = {each.pipeline.variant: each for each in attempts}
        left = self._most - sum(not each.is_known for each in attempts)
        for variants in self._rounds:
            found = [each for each in dict.fromkeys(variants) if each not in self._made]
            if found and left > 0:
                return [*map(self._build, found[:left])]
        return []

    def report(self, chosen: Program) -> None:
        """Note in the chosen plan what its simulation says of the prices of its search."""
        played = play(chosen, self._costs)
        exposed = exposure_of(chosen, played).by_axis() or "nothing"
        text = f"{in_ms(played.ended - played.began)} simulated; exposed of its communication: {exposed}"
        chosen.note("search", "the whole step", text)
        for each in self._fastest()[:SHOWN]:
            chosen.note(COMPARED, *_figures(each))

    def _fastest(self) -> list[Attempt]:
        """The plans that were made, the fastest first."""
        made = (each for each in self._made.values() if each.program is not None and not each.is_known)
        return sorted(made, key=lambda each: inf if each.seconds is None else each.seconds)

    def needed_by_level(self) -> dict[int, int]:
        """Bytes of the plan that needs least on each level of the parallel optimizer, where none fits; 0: off."""
        found: dict[int, int] = {}
        for variant, made in self._made.items():
            level = variant.get("level", 0)
            found[level] = min(found.get(level, made.needed), made.needed)
        return dict(sorted(found.items()))

    def _all_rounds(self) -> Iterator[list[Variant]]:
        if self._limit is not None:
            yield from self._within(self._limit)
        yield from self._priced_as_simulated()

    # Memory

    def _within(self, limit: int) -> Iterator[list[Variant]]:
        """Levels of the parallel optimizer where something does not fit as it is, and then searches that save memory
        without it, and on the last level."""
        plain = self._search.but(searched=False)
        too_large = [each for each in (self._search, plain) if not self._fits(each) and not self._made[each].is_known]
        if not too_large:
            return
        for level in sorted(self._levels, key=_by_use):
            if level == GRADIENTS and not self._is_of_use(too_large):
                continue
            yield [each.but(level=level) for each in too_large]
        ends = (self._search, self._search.but(level=max(self._levels, default=0)))
        saving = {each: self._made[each].needed - limit for each in ends if each in self._made and not self._fits(each)}
        for _ in range(SAVINGS):
            yield [each.but(saving=count) for each, count in saving.items()]
            more = {each: self._more(each, count, limit) for each, count in saving.items()}
            saving = {each: count for each, count in more.items() if count}
        for part in PARTS:  # where more is saved, the peak may lie elsewhere, and be higher or lower there
            if self._any_fits:
                return
            yield [each.but(saving=int(part * self._made[each].needed)) for each in ends if each in self._made]

    def _is_of_use(self, too_large: Sequence[Variant]) -> bool:
        """Whether the level of gradients may be: it takes no less memory than that of parameters, and no less time than
        that of states."""
        states, parameters = (
            [self._fits(each.but(level=level)) for each in too_large] if level in self._levels else None
            for level in (STATES, PARAMETERS)
        )
        return not (states and all(states)) and (parameters is None or any(parameters))

    @property
    def _any_fits(self) -> bool:
        return any(each.program is not None for each in self._made.values())

    def _fits(self, variant: Variant) -> bool:
        return variant in self._made and self._made[variant].program is not None

    def _more(self, variant: Variant, saving: int, limit: int) -> int:
        """What to save where a search that saves so much by its own count still takes too much: as much more as the
        plan has come short of. 0: it fits, or its plan takes more than without saving."""
        made, needed = self._made.get(variant.but(saving=saving)), self._made[variant].needed
        if made is None or made.program is not None or made.needed >= needed:
            return 0
        return max(saving + made.needed - limit, saving * (needed - limit) // (needed - made.needed))

    # Overlap

    def _priced_as_simulated(self) -> Iterator[list[Variant]]:
        """Searches with the prices of the fastest plan on each grid, of data parallel and of one inside of it, then of
        the fastest that these have found. Grids are searched quickly, and the best one once more at the end."""
        fastest: dict[tuple[bool, str], Variant] = {}
        for each in sorted((each for each in self._made if self._fits(each)), key=self._seconds):
            where = str(each.get("split", "")) or ("inner" if each.get("inner", False) else "")
            fastest.setdefault((bool(each.get("searched", True)), where), each)
        begin = list(fastest.values())
        for _ in range(ALTERNATIONS):
            asked = [self._as_simulated(each) for each in dict.fromkeys(begin)]
            if all(each in self._made for each in asked):
                break
            yield asked
            new = (each for each in asked if self._fits(each) and not self._made[each].is_known)
            begin = sorted(new, key=self._seconds)[:GO_ON]
        best = min((each for each in self._made if self._fits(each)), key=self._seconds, default=None)
        if best is not None and best.get("quick", False):
            yield [best.but(quick=False)]

    def _as_simulated(self, variant: Variant) -> Variant:
        """The search with the prices of a plan."""
        program = self._made[variant].program
        assert program is not None
        return variant.but(searched=True, exposed=str(exposure_of(program, play(program, self._costs))))

    def _seconds(self, variant: Variant) -> float:
        seconds = self._made[variant].seconds
        return inf if seconds is None else seconds


def _figures(made: Attempt) -> tuple[str, str]:
    """What a plan is called, and what its search and its simulation say of the step."""
    program = made.program
    assert program is not None and made.seconds is not None, "plans of a search are simulated"
    priced = "" if program.search_seconds is None else f"{in_ms(program.search_seconds)} by the prices of its search, "
    return f"{plan_name(made)}, {program.mesh}", f"{priced}{in_ms(made.seconds)} simulated"
