"""In which form a configuration is used and beside what, and the cases that the table of options tells apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.options import MEASURED, PRESETS
from commfuse_fx.config.parallel_optimizer import BROADCAST, GRADIENTS, ParallelOptimizer
from commfuse_fx.machine.source import resolve_costs


@dataclass(frozen=True)
class Use:
    """A use says in which form a configuration is compiled, and what of it the call itself has given."""

    config: CompileConfig
    form: str
    has_optimizer: bool
    given: Mapping[str, Any]

    @property
    def mode(self) -> str:
        return self.config.parallel_mode

    @property
    def sharing(self) -> ParallelOptimizer:
        """What the options of the parallel optimizer say, whether it is on or not."""
        return ParallelOptimizer.parse(self.config.parallel_optimizer_config)

    @property
    def is_step(self) -> bool:
        return self.form == "step"

    @property
    def shares_updates(self) -> bool:
        """Whether the parallel optimizer is on, or a search may turn it on."""
        return self.config.enable_parallel_optimizer or (bool(self.config.free_levels) and self.has_optimizer)

    @property
    def has_no_switch(self) -> bool:
        """Whether nothing has turned the parallel optimizer on, nor off."""
        return not (self.shares_updates or "enable_parallel_optimizer" in self.given)

    @property
    def is_switched_off(self) -> bool:
        return not self.shares_updates and "enable_parallel_optimizer" in self.given

    @property
    def divides_rows(self) -> bool:
        """Whether a module is asked to divide gradients or parameters."""
        return not self.is_step and self.sharing.level >= GRADIENTS

    @property
    def is_in_order(self) -> bool:
        """Whether gradients are sent in the order of the parameters, whatever that costs."""
        return self.config.find_unused_parameters and self.config.capture == "trace"

    @property
    def is_measured(self) -> bool:
        return bool(self.config.cluster == MEASURED)

    @property
    def has_another_cluster(self) -> bool:
        """Whether `cluster=` is given, and mode "optimal" has brought another one, which holds."""
        of_fusion, own = self.config.comm_fusion.optimal_cluster, self.given.get("cluster")
        if of_fusion is None or own is None:
            return False
        return own in (MEASURED, PRESETS) or resolve_costs(own) != self.config.cluster

    @property
    def moves_nothing(self) -> bool:
        """Whether prices find no order, no buckets and no strategies."""
        return self.config.schedule == "none" and not self.config.comm_fusion.is_optimal and self.mode != "auto"

    @property
    def prices_nothing(self) -> bool:
        return not (self.config.plans_by_cost or self.config.is_auto or self.mode == "auto")


WHERE: Mapping[str, tuple[Callable[[Use], bool], str]] = MappingProxyType(
    {
        "alone": (lambda use: use.mode == "stand_alone", 'with parallel_mode="stand_alone"'),
        "alone, one batch": (
            lambda use: use.mode == "stand_alone" and use.config.accumulate_steps == 1,
            'with parallel_mode="stand_alone"',
        ),
        "divided": (lambda use: use.config.divides_graphs, 'with parallel_mode="{mode}"'),
        "divided, one batch": (
            lambda use: use.config.divides_graphs and use.config.accumulate_steps == 1,
            'with parallel_mode="{mode}"',
        ),
        "not searched": (lambda use: use.mode != "auto", 'with parallel_mode="{mode}"'),
        "no strategies": (lambda use: use.config.strategy_ckpt_load_file is None, "without strategy_ckpt_load_file"),
        "module": (lambda use: not use.is_step, "with the module form"),
        "module of rows": (lambda use: not use.is_step, "with the module form and level={level}"),
        "rows": (
            lambda use: use.divides_rows and use.config.enable_parallel_optimizer,
            "with the module form and enable_parallel_optimizer=True",
        ),
        "module of whole parameters": (lambda use: not (use.is_step or use.divides_rows), "with the module form"),
        "step": (lambda use: use.is_step, 'with form="step"'),
        "dynamo": (lambda use: use.config.capture == "dynamo", 'with capture="dynamo"'),
        "no optimizer": (lambda use: not use.has_optimizer, "without an optimizer"),
        "no update": (lambda use: use.is_step and not use.has_optimizer, "without an optimizer"),
        "no switch": (lambda use: use.is_step and use.has_no_switch, "without enable_parallel_optimizer=True"),
        "switched off": (lambda use: use.is_step and use.is_switched_off, "with enable_parallel_optimizer=False"),
        "rows, no switch": (
            lambda use: use.divides_rows and use.has_no_switch,
            "without enable_parallel_optimizer=True",
        ),
        "rows, switched off": (
            lambda use: use.divides_rows and use.is_switched_off,
            "with enable_parallel_optimizer=False",
        ),
        "owners": (lambda use: use.sharing.mode == BROADCAST, 'with mode="broadcast"'),
        "one batch": (lambda use: use.config.accumulate_steps == 1, "with accumulate_steps=1"),
        "in order": (lambda use: use.is_in_order, "with find_unused_parameters=True"),
        "eager": (lambda use: use.config.backend == "eager", 'with backend="eager"'),
        "closed": (lambda use: not use.config.comm_fusion.openstate, 'with comm_fusion["openstate"]=False'),
        "another cluster": (lambda use: use.has_another_cluster, 'with another one of comm_fusion in mode "optimal"'),
        "nothing moved": (lambda use: use.moves_nothing, 'with schedule="none"'),
        "default prices": (lambda use: use.config.cluster == PRESETS and use.prices_nothing, "without a plan by cost"),
        "nothing measured": (lambda use: not use.config.measures, "without a plan from measurement"),
        "virtual": (lambda use: use.config.device_num is not None, "with device_num={device_num}"),
        "kept plan": (lambda use: use.config.replan is False, "with replan=False"),
        "alone, measured": (
            lambda use: use.is_measured and use.mode == "stand_alone",
            'with parallel_mode="stand_alone"',
        ),
        "virtual, measured": (
            lambda use: use.is_measured and use.config.device_num is not None,
            "with device_num={device_num}",
        ),
        "kept plan, measured": (lambda use: use.is_measured and use.config.replan is False, "with replan=False"),
    }
)
"""Name of a case -> whether a use is one, and how a message says so."""
