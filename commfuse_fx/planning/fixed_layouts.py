"""What graphs of a step have decided for those that follow: all of them work on the same parts of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.capture.guards.model_structure import ModelStructure
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.program import Layouts, Program


@dataclass
class FixedLayouts:
    """Decisions that hold for a model as long as its structure is the same.

    is_final: False for those of a search for an evaluation. They hold until there is a training step.
    layouts: of the parameters, once a graph has decided them.
    level: of the parallel optimizer, once a search has chosen it; 0: it is off.
    """

    structure: ModelStructure | None = None
    is_final: bool = True
    layouts: Layouts | None = None
    level: int | None = None

    def holds_for(self, structure: ModelStructure, is_final: bool) -> bool:
        return self.structure == structure and (self.is_final or not is_final)

    def note(self, program: Program, config: CompileConfig) -> None:
        """Take up what a graph has decided. config: what the user has asked for."""
        self.layouts = {name: param.layout_by_marks for name, param in program.params.items()}
        if program.training and config.says_nothing_of_levels:
            chosen = program.config.parallel_optimizer
            self.level = 0 if chosen is None else chosen.level

    def as_chosen(self, config: CompileConfig) -> CompileConfig:
        """The configuration with the level of the parallel optimizer that a search has chosen: all graphs have one."""
        is_open = self.level is not None and config.says_nothing_of_levels
        return config.with_level(self.level or 0) if is_open else config
