"""What a pass declares: its name and options, the facts it builds on, and when a compile runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import Program

Scalar = str | int | float | bool | None


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
class Situation:
    """A situation decides which passes run, and with which options.

    config, mesh: the options of the compile, and the ranks as a grid.
    variant: which way to plan is tried.
    costs: prices of nodes and collectives. None: nothing is planned by cost.
    batch: paths of the call's tensors that full_batch cuts, or that have the batch as their first dimension
        where the step is divided.
    flat_updates: whether parameters of a bucket may be updated as one tensor.
    same_batches: whether the ranks' batches have one size. Where they do not, what makes both gradients of a
        layer is one op on some ranks and two on others, and the order of two must not matter.
    local_parameters, marks, layouts: as for `Divide`.
    """

    config: CompileConfig
    mesh: Mesh
    variant: Variant = Variant()
    costs: CostModel | None = None
    batch: tuple[str, ...] = ()
    flat_updates: bool = True
    same_batches: bool = True
    local_parameters: bool = False
    marks: Any = None
    layouts: Any = None

    @property
    def divides(self) -> bool:
        """Whether one device's graph is divided among the ranks."""
        return self.config.divides_graphs

    @property
    def rewrites_kernels(self) -> bool:
        """Whether passes run that only make kernels of the CPU faster; in a divided step none does."""
        return self.config.cpu_kernels and not self.divides

    @property
    def reduced_group(self) -> str | None:
        """The mesh axes over which gradients are reduced where every rank has its own batch; None: they are not."""
        return None if self.config.parallel_mode == "stand_alone" else self.mesh.all_axes

    @property
    def schedules(self) -> bool:
        """Whether nodes may be moved."""
        return self.config.schedule != "none"

    @property
    def across_steps(self) -> bool:
        """Whether communication may run on into the next step."""
        return bool(self.variant.get("across_steps", self.config.across_steps))


class Pass:
    """A graph-to-graph transformation: a frozen dataclass whose fields are its options.

    `requires` and `ensures` name facts about the program ("lowered", "reduced", ...): the pipeline refuses an order in
    which a required fact was not established before.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def when(cls, situation: Situation) -> Pass | None:
        """The pass as a compile in this situation runs it, or None where it does not. By default it always runs."""
        return cls()

    def __call__(self, program: Program) -> bool:
        """Transform the program in place. Returns whether anything changed."""
        raise NotImplementedError
