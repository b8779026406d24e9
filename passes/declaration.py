"""What a pass declares: its name and options, the facts it builds on, and when a compile runs it.

Why: docs/decisions.md, "One table of passes, and a pass says itself when it runs".
Why: docs/decisions.md, "Options of passes are scalars".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import CostModel, cost_model
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import Program

Scalar = str | int | float | bool | None

Known = TypeVar("Known")


@dataclass(frozen=True)
class Variant:
    """A variant is one way to plan a step.

    choices: what has been chosen, by name, in the order of the names. What has not been chosen has the default
        of whoever asks for it.
    """

    choices: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, **choices: Scalar) -> Variant:
        """The variant with these choices."""
        return cls(tuple(sorted(choices.items())))

    def but(self, **choices: Scalar) -> Variant:
        """The same with other choices."""
        return Variant.of(**{**dict(self.choices), **choices})

    def get(self, name: str, default: Any) -> Any:
        """What has been chosen under this name."""
        return dict(self.choices).get(name, default)


@dataclass(frozen=True)
class Variants:
    """Variants are the ways to plan a step that are worth a look, the most promising first.

    searched: those that search for something; of equally fast plans the first is taken.
    fixed: those that follow from rules alone. They are made after the others, as far as there is time.
    """

    searched: tuple[Variant, ...] = (Variant(),)
    fixed: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Situation:
    """A situation decides which passes run, and with which options.

    config, mesh: the options of the compile, and the ranks as a grid.
    variant: which way to plan is tried.
    flat_updates: whether parameters of a bucket may be updated as one tensor.
    same_batches: whether the ranks' batches have one size. Where they do not, what makes both gradients of a
        layer is one op on some ranks and two on others, and the order of two must not matter.
    local_parameters: whether every rank keeps its part of a divided parameter.
    gradients: "reduced" over the ranks; "local": each rank keeps its own; "accumulated": added to what `.grad` holds,
        or what earlier micro-batches of a step have left, and the sum is reduced; "given": inputs, which ranks have
        reduced before.
    by_autograd: whether autograd computes the gradients, op by op, and the program holds their communication only.
    by_rules: whether plans follow from rules alone, as ranks may plan at other times and cannot agree on prices.
    """

    config: CompileConfig
    mesh: Mesh
    variant: Variant = Variant()
    flat_updates: bool = True
    same_batches: bool = True
    local_parameters: bool = False
    gradients: str = "reduced"
    by_autograd: bool = False
    by_rules: bool = False

    def of(self, variant: Variant) -> Situation:
        """The same where this way to plan is tried. A level of the parallel optimizer that it has is as one that the
        user has asked for."""
        level = variant.get("level", None)
        config = self.config if level is None else self.config.with_level(level)
        return replace(self, config=config, variant=variant)

    def free_levels(self, program: Program) -> tuple[int, ...]:
        """The levels of the parallel optimizer that a search of strategies may choose for this program besides none."""
        is_open = program.strategies is None and self.can_share_updates(program)
        return self.config.free_levels if is_open else ()

    def can_share_updates(self, program: Program) -> bool:
        """Whether ranks may divide the update of this program's parameters among them."""
        optimizer = program.optimizer
        is_known = optimizer is not None and optimizer.rule != "opaque" and bool(program.grads)
        is_reduced = self.gradients in ("reduced", "accumulated") and self.config.parallel_mode != "stand_alone"
        return is_known and is_reduced and self.mesh.world > 1

    @property
    def divides(self) -> bool:
        """Whether one device's graph is divided among the ranks."""
        return self.config.divides_graphs

    @property
    def searches(self) -> bool:
        """Whether the strategies of that graph are searched."""
        return self.config.parallel_mode == "auto"

    @property
    def rewrites_kernels(self) -> bool:
        """Whether passes run that only make kernels of the CPU faster; in a divided step none does."""
        return self.config.cpu_kernels and not self.divides

    @property
    def reduced_group(self) -> str | None:
        """The mesh axes over which gradients are reduced where every rank has its own batch; None: they are not."""
        if self.config.parallel_mode == "stand_alone" or self.gradients in ("local", "given"):
            return None
        return self.mesh.all_axes

    @property
    def scattered_group(self) -> str | None:
        """As `reduced_group`, and also where the graph of a micro-batch that others follow has parts as the last one
        has."""
        if self.shards_micro_batches and self.config.parallel_mode != "stand_alone":
            return self.mesh.all_axes
        return self.reduced_group

    @property
    def holds_gradients(self) -> bool:
        """Whether the graph is that of a micro-batch which leaves its gradients to a later one, that updates."""
        return self.config.accumulate_steps > 1 and self.gradients == "local"

    @property
    def scatters_gradients(self) -> bool:
        """Whether a rank holds its rows of a gradient alone, where it updates rows."""
        asked = self.config.parallel_optimizer
        return asked is not None and asked.level > 1

    @property
    def keeps_rows(self) -> bool:
        """Whether a rank keeps its rows of a parameter alone, where it updates rows."""
        asked = self.config.parallel_optimizer
        return asked is not None and asked.level == 3

    @property
    def holds_rows(self) -> bool:
        """Whether the sums that micro-batches leave are the rows that a rank updates, where it updates rows."""
        asked = self.config.parallel_optimizer
        return self.config.accumulate_steps > 1 and asked is not None and asked.gradient_accumulation_shard

    @property
    def shards_micro_batches(self) -> bool:
        """Whether the graph is that of a micro-batch which others follow, and it divides what the last one divides:
        parameters of which a rank keeps rows alone, or sums of gradients."""
        return self.holds_gradients and (self.holds_rows or self.keeps_rows)

    @property
    def by_cost(self) -> bool:
        """Whether the plan follows from predicted times."""
        return self.config.plans_by_cost and not (self.in_order or self.by_rules or self.by_autograd)

    @property
    def in_order(self) -> bool:
        """Whether gradients are sent in the order of the parameters, the last one first, so that ranks that compute
        different things send the same."""
        return self.config.find_unused_parameters

    @property
    def schedules(self) -> bool:
        """Whether nodes may be moved."""
        return self.config.schedule != "none" and not self.in_order

    @property
    def across_steps(self) -> bool:
        """Whether communication may run on into the next step."""
        return bool(self.variant.get("across_steps", self.config.across_steps))


@dataclass(frozen=True)
class PassContext:
    """A context is what passes may ask for besides the program.

    prices: what nodes and collectives cost. None: there is no cluster.
    kept: what the plans of one compile find out once, by its class. None: plans share nothing.
    """

    prices: CostModel | None = None
    kept: dict[type, Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, config: CompileConfig) -> PassContext:
        """The prices of the configured cluster."""
        return cls(None if config.cluster is None else cost_model(config.cluster))

    @property
    def costs(self) -> CostModel:
        """Raises ConfigValueError where there are no prices."""
        if self.prices is None:
            raise ConfigValueError(
                "a pass plans by cost, but the graph was compiled without a cluster; give one with --cluster"
            )
        return self.prices

    def known(self, kind: type[Known]) -> Known:
        """The one object of this class, which takes no arguments, for all plans of a compile."""
        if self.kept is None:
            return kind()
        if kind not in self.kept:
            self.kept[kind] = kind()
        found: Known = self.kept[kind]
        return found


NO_PRICES = PassContext()


class Pass:
    """A graph-to-graph transformation: a frozen dataclass whose fields are its options.

    `requires` and `ensures` name facts about the program ("lowered", "reduced", ...): the pipeline refuses an order in
    which a required fact was not established before.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    numerics: ClassVar[str]
    """What becomes of the numbers of a step. "bitwise": they keep every bit. "reordered": sums run in another order, or
    on other ranks first, so that they differ by rounding. "defines": the pass says what is computed, such as which
    gradients are summed or which random numbers are drawn, so that there is nothing to compare with."""
    needs_sizes: ClassVar[bool] = False
    """Whether it works on what a step computes, which takes the sizes of that. Where autograd computes, as in a graph
    for any size, it is skipped, and `explain()` says so."""
    always_offers: ClassVar[bool] = False
    """Whether it has candidates also where the schedule does not follow from predicted times."""
    optional: ClassVar[bool] = False
    """Whether plans are made with it and without it. Where it changes nothing, the one with it is not needed."""

    @classmethod
    def when(cls, situation: Situation) -> Pass | None:
        """The pass as a compile in this situation runs it, or None where it does not. By default it always runs."""
        return cls()

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        """The variants that are found by now, and where they belong those that this pass offers. By default none.

        situation: of the compile. It plans by cost, unless the pass offers always.
        program: the captured program.
        found: what later passes of the table offer.
        """
        return found

    def outcome(self, before: Program, after: Program | None, known: Mapping[str, Hashable]) -> Hashable:
        """What this pass decides in a plan: plans whose passes decide alike are the same. By default its options.

        A pass that overrides this runs in each plan anew, and so do all behind it, also where options are the same.

        before: the program before the first pass in which plans differ.
        after: the program on which this pass has just run. None: it has not run.
        known: what earlier passes decide, by the facts that they ensure.
        """
        return self

    @classmethod
    def keep_notes(cls, chosen: Program, planned: Sequence[Program]) -> None:
        """Note in the chosen plan what this pass has found out in another one. By default nothing.

        planned: all plans that were made, the chosen one among them.
        """

    def __call__(self, program: Program) -> bool:
        """Transform the program in place. Returns whether anything changed."""
        raise NotImplementedError


class PricedPass(Pass):
    """A priced pass asks what nodes and collectives cost: a pipeline hands it its context."""

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        """Transform the program in place. Returns whether anything changed. Raises ConfigValueError without prices."""
        raise NotImplementedError
