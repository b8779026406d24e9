"""The configuration of one `compile`: every option, checked and filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from commfuse_fx.config.context import context_settings
from commfuse_fx.config.fusion_config import KINDS, FusionConfig, KindFusion
from commfuse_fx.config.options import (
    DEFAULTS,
    DEFAULTS_OF_MODULE,
    MEASURED,
    PARALLEL_MODE_ALIASES,
    PRESETS,
    Default,
    ScheduleConfig,
    TrialLimits,
    limited,
    validated,
)
from commfuse_fx.config.parallel_optimizer import BROADCAST, LEVELS, ParallelOptimizer
from commfuse_fx.errors import ConfigKeyError, ConfigValueError, NotAvailableError
from commfuse_fx.machine.source import Costs, costs_label, resolve_costs
from commfuse_fx.support.checks import show

__all__ = ["DEFAULTS", "CompileConfig", "Default", "FusionConfig", "KindFusion", "ScheduleConfig", "TrialLimits"]

# Options of which only the default is available, and what the default does.
_ONLY_DEFAULT: Mapping[str, str] = MappingProxyType(
    {
        "pipeline_stages": "every rank runs the whole model",
        "exchange_factors": "gradients are reduced as they are",
        "gradient_compression": "gradients are sent as they are",
    }
)


@dataclass(frozen=True)
class WithoutEffect:
    """An option without effect is one that was given and changes nothing of what is compiled.

    option: with its value.
    reason: beside what, what there is in its place, and what to do.
    warns: whether its user is warned.
    """

    option: str
    reason: str
    warns: bool


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Every option of `compile` but the model, loss function and optimizer; `resolve` makes a valid one."""

    comm_fusion: FusionConfig
    has_aux: bool
    """Whether a step returns more than its loss."""
    return_loss: bool
    """Whether a training step returns its loss, rather than None."""
    parallel_mode: str
    """One of "stand_alone", "data_parallel", "hybrid_parallel", "semi_auto" and "auto"; aliases are resolved."""
    mesh: Any
    """A DeviceMesh, a tuple of axis sizes, or None: one axis over the world."""
    device_num: int | None
    """Size of the virtual world, or None: the real one."""
    global_rank: int | None
    """Rank in the virtual world; None exactly when `device_num` is None."""
    gradients_mean: bool
    gradient_fp32_sync: bool
    enable_parallel_optimizer: bool
    parallel_optimizer_config: dict[str, Any] | None
    """As it was given, without keys that have no effect."""
    search_mode: str
    strategy_ckpt_load_file: str | os.PathLike[str] | None
    strategy_ckpt_load_strict: bool
    """Whether a file that does not fit the step in all entries is refused."""
    strategy_ckpt_save_file: str | os.PathLike[str] | None
    full_batch: bool
    parameter_broadcast: bool
    broadcast_buffers: bool
    find_unused_parameters: bool
    """Whether the parameters that a backward does not reach take part with zeros; for the module form."""
    capture: str
    pipeline_stages: int
    accumulate_steps: int
    """Of how many calls one updates, with the gradients of all of them."""
    clip_grad_norm: float | None
    """The largest norm that all gradients together may have in an update; None: any."""
    schedule: str | ScheduleConfig
    """One of "overlap", "none" and "auto", or a ScheduleConfig."""
    replan: bool | TrialLimits
    """Whether another plan may take the place of the one that runs, and what finding it may take."""
    backend: str
    """How compute between collectives is generated: "eager" or "inductor"."""
    inductor_regions: str
    """Where regions that Inductor compiles end: "stretches" or "layers"."""
    cuda_graph: bool | str
    """Whether a step runs in CUDA graphs: "auto", True or False."""
    cpu_kernels: bool
    """Whether passes run that only make kernels of the CPU faster."""
    skip_passes: tuple[str, ...]
    """The passes that do not run, sorted."""
    cluster: Any
    """What plans are priced with: a ClusterSpec, a StepProfile, "measured", "default", or None."""
    exchange_factors: str
    gradient_compression: Any
    without_effect: tuple[WithoutEffect, ...] = field(default=(), compare=False, repr=False)
    """The options that were given and change nothing, here or wherever they are given. No option."""
    says_nothing_of_levels: bool = field(default=False, compare=False)
    """Whether neither the call nor the context has said whether the parallel optimizer is on. No option."""

    @classmethod
    def resolve(cls, given: Mapping[str, Any], form: str = "step") -> CompileConfig:
        """The configuration for the options `given`, then the process-wide context, then the defaults.

        A value that is a `Default` counts as not given, and so does comm_fusion=None. `comm_fusion` is one
        option: where it is given, kinds it leaves out are default, whatever the context says. A virtual
        world is rank 0 by default. form: "step" or "module", which have some defaults of their own.

        Raises ConfigKeyError for an unknown option, ConfigTypeError or ConfigValueError for a bad value, and
        NotAvailableError, once everything is valid, for a value that is not available yet.
        """
        for name in given:
            if name not in DEFAULTS:
                raise ConfigKeyError(f"{show(name)} is not an option; use one of {', '.join(DEFAULTS)}")
        explicit = {name: value for name, value in given.items() if not isinstance(value, Default)}
        if explicit.get("comm_fusion", ...) is None:
            del explicit["comm_fusion"]
        given_for_all = {**context_settings(), **explicit}
        own = DEFAULTS_OF_MODULE if form == "module" else {}
        if str(given_for_all.get("parallel_mode")).startswith(("semi_auto", "auto")):
            own = {}  # which has no module form yet
        if own and explicit.get("broadcast_buffers", ...) is None:
            del given_for_all["broadcast_buffers"]
        settings = {**DEFAULTS, "skip_passes": _skipped_in_environment(), **own, **given_for_all}
        if "device_num" in explicit and explicit["device_num"] is None and "global_rank" not in explicit:
            settings["global_rank"] = None  # the context's rank is one of the world just turned off
        fusion = FusionConfig.parse(settings.pop("comm_fusion"))
        settings = validated(settings)
        if fusion.optimal_cluster is not None:
            settings["cluster"] = resolve_costs(fusion.optimal_cluster)
        settings["global_rank"] = _resolve_rank(settings["device_num"], settings["global_rank"])
        settings["schedule"] = limited(settings["schedule"], settings.pop("memory_limit"))
        mode = settings["parallel_mode"]
        settings["parallel_mode"] = PARALLEL_MODE_ALIASES.get(mode, mode)
        _check_available(settings)
        is_open = "enable_parallel_optimizer" not in given_for_all
        return cls(comm_fusion=fusion, **settings, says_nothing_of_levels=is_open)

    @property
    def divides_graphs(self) -> bool:
        """Whether one device's graph is divided among the ranks, rather than run by each on its own batch."""
        return self.parallel_mode in ("semi_auto", "auto")

    @property
    def propagates(self) -> bool:
        """Whether the user's marks alone say over which axes a model is divided, and a search completes them."""
        return self.parallel_mode == "auto" and self.search_mode == "sharding_propagation"

    @property
    def parallel_optimizer(self) -> ParallelOptimizer | None:
        """How updates are divided among ranks; None where every rank makes all of them."""
        is_on = self.enable_parallel_optimizer and self.parallel_mode != "stand_alone"
        return ParallelOptimizer.parse(self.parallel_optimizer_config) if is_on else None

    @property
    def free_levels(self) -> tuple[int, ...]:
        """The levels of the parallel optimizer that a search of strategies may choose among, besides none: where memory
        has a limit, and nobody has said whether it is on."""
        if not (self.parallel_mode == "auto" and self.says_nothing_of_levels and self.memory_limit is not None):
            return ()
        asked = self.parallel_optimizer_config or {}
        if "level" in asked:
            return (ParallelOptimizer.parse(asked).level,)
        return LEVELS if asked.get("mode") != BROADCAST else LEVELS[:-1]

    def with_level(self, level: int) -> CompileConfig:
        """The same with the parallel optimizer on this level; on none, off."""
        if not level:
            return replace(self, enable_parallel_optimizer=False, says_nothing_of_levels=False)
        options = {**(self.parallel_optimizer_config or {}), "level": level}
        return replace(
            self, enable_parallel_optimizer=True, parallel_optimizer_config=options, says_nothing_of_levels=False
        )

    @property
    def asks_to_measure(self) -> bool:
        """Whether the user has asked for plans that follow from what a step measures while it trains."""
        return self.is_auto or self.cluster == MEASURED

    @property
    def is_auto(self) -> bool:
        """Whether the schedule is one of several that are tried."""
        return self.schedule == "auto" or (isinstance(self.schedule, ScheduleConfig) and self.schedule.mode == "auto")

    @property
    def measures(self) -> bool:
        """Whether plans follow from that where it can be measured."""
        return self.asks_to_measure or (self.cluster is None and self.plans_by_cost)

    @property
    def figures(self) -> Costs | None:
        """The figures that were given."""
        return None if self.cluster in (MEASURED, PRESETS) else self.cluster

    @property
    def unmeasured(self) -> CompileConfig:
        """The same where nothing can be measured, or the plan is to stay."""
        if self.is_auto:  # figures are what other plans than this one follow from, but for strategies, which stay
            limit, figures = self.memory_limit, self.figures if self.parallel_mode == "auto" else None
            schedule = "overlap" if limit is None else ScheduleConfig(memory_limit=limit)
            return replace(self, cluster=figures, schedule=schedule)
        return replace(self, cluster=self.figures)

    @property
    def first(self) -> CompileConfig:
        """The configuration of the plan that runs before anything has been measured: it keeps a memory limit."""
        found = self.unmeasured
        if isinstance(found.schedule, ScheduleConfig):
            found = replace(found, schedule=replace(found.schedule, across_steps=False))
        return replace(found, comm_fusion=self.comm_fusion.in_place_of_optimal(KindFusion()))

    @property
    def across_steps(self) -> bool:
        """Whether communication is to run on into the next step."""
        return isinstance(self.schedule, ScheduleConfig) and self.schedule.across_steps is True

    @property
    def tries_across_steps(self) -> bool:
        """Whether that is among the plans that are tried."""
        is_refused = isinstance(self.schedule, ScheduleConfig) and self.schedule.across_steps is False
        return self.across_steps or (self.is_auto and not is_refused)

    @property
    def memory_limit(self) -> int | None:
        return self.schedule.memory_limit if isinstance(self.schedule, ScheduleConfig) else None

    @property
    def plans_by_cost(self) -> bool:
        """Whether the plan follows from predicted times, so that a cluster is needed."""
        asked = self.cluster not in (None, PRESETS) or self.across_steps or self.memory_limit is not None
        return self.comm_fusion.is_optimal or (asked and self.schedule != "none")

    def header(self) -> list[tuple[str, str]]:
        """(name, value) of each option that affects the graph, in a fixed order, the same on every rank."""
        fusion = [(f"comm_fusion.{kind}", _fusion_text(getattr(self.comm_fusion, kind))) for kind in KINDS]
        schedule = "overlap" if self.schedule == ScheduleConfig() else str(self.schedule)
        divided = self.parallel_optimizer
        names = ("parallel_mode", "gradients_mean", "gradient_fp32_sync", "full_batch", "parameter_broadcast")
        return [
            ("comm_fusion.openstate", str(self.comm_fusion.openstate)),
            *fusion,
            *((name, str(getattr(self, name))) for name in names),
            *((("broadcast_buffers", "True"),) if self.broadcast_buffers else ()),
            *((("find_unused_parameters", "True"),) if self.find_unused_parameters else ()),
            *((("enable_parallel_optimizer", "True"),) if divided is not None else ()),
            *((("parallel_optimizer_config", str(divided)),) if divided is not None and str(divided) else ()),
            *((("accumulate_steps", str(self.accumulate_steps)),) if self.accumulate_steps > 1 else ()),
            *((("clip_grad_norm", str(self.clip_grad_norm)),) if self.clip_grad_norm is not None else ()),
            ("schedule", schedule),
            *((("backend", self.backend),) if self.backend != "eager" else ()),
            *((("inductor_regions", self.inductor_regions),) if self.inductor_regions != "stretches" else ()),
            ("cpu_kernels", str(self.cpu_kernels)),
            *((("skip_passes", ",".join(self.skip_passes)),) if self.skip_passes else ()),
            *((("cluster", costs_label(self.cluster)),) if self.plans_by_cost and self.cluster is not None else ()),
        ]


def _skipped_in_environment() -> tuple[str, ...]:
    """COMMFUSE_SKIP, as in "overlap,merge_equal"."""
    return tuple(name.strip() for name in os.environ.get("COMMFUSE_SKIP", "").split(",") if name.strip())


def _resolve_rank(device_num: int | None, global_rank: int | None) -> int | None:
    if device_num is not None:
        return 0 if global_rank is None else global_rank
    if global_rank is not None:
        raise ConfigValueError(
            f"global_rank is {global_rank} but device_num is not given; give device_num in 1..4096 as well "
            "(then global_rank in 0..device_num-1), or neither"
        )
    return None


def _check_available(settings: Mapping[str, Any]) -> None:
    for name, meaning in _ONLY_DEFAULT.items():
        if settings[name] != DEFAULTS[name]:
            raise NotAvailableError(
                f"{name}={show(settings[name])} is not available yet; use {name}={DEFAULTS[name]!r} ({meaning})"
            )


def _fusion_text(fusion: KindFusion) -> str:
    """As in "auto", "size 32" or "index 20,35"."""
    if fusion.config is None or fusion.mode == "optimal":
        return fusion.mode
    numbers = (fusion.config,) if isinstance(fusion.config, int) else fusion.config
    return f"{fusion.mode} {','.join(map(str, numbers))}"
