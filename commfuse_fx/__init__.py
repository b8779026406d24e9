"""commfuse-fx: a graph compiler for distributed training in PyTorch.

The names in `__all__` are public. A name is imported when it is first asked for: tracing needs parts of PyTorch
that take a second to import, and many programs only read a file or set an option.

Why: docs/decisions.md, "Public names are imported when they are asked for".
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commfuse_fx.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    CommFuseError,
    ConfigKeyError,
    ConfigTypeError,
    ConfigValueError,
    ForkError,
    NotAvailableError,
    NotThereError,
    PeerFailedError,
    PlanMismatchError,
    VerificationError,
    VirtualWorldError,
)
from commfuse_fx.support.late_imports import import_when_missed

if TYPE_CHECKING:
    from commfuse_fx import ops
    from commfuse_fx.api import compile
    from commfuse_fx.calls.verified_step import StepDifference, VerifiedStep
    from commfuse_fx.checkpoints.saving import Saving
    from commfuse_fx.config.compile_config import ScheduleConfig, TrialLimits
    from commfuse_fx.config.context import (
        get_auto_parallel_context,
        reset_auto_parallel_context,
        set_auto_parallel_context,
    )
    from commfuse_fx.config.fusion_marks import set_comm_fusion
    from commfuse_fx.cost.collective_cost import CollectiveCost, collective_cost
    from commfuse_fx.frontends.module import CompiledModule
    from commfuse_fx.frontends.sharded_optimizer import ShardedOptimizer
    from commfuse_fx.frontends.step import CompiledStep
    from commfuse_fx.inspect.diff.diff_graphs import diff
    from commfuse_fx.inspect.diff.graph_diff import GraphDiff
    from commfuse_fx.inspect.diff.load import load
    from commfuse_fx.inspect.diff.strategy_diff import StrategyDiff
    from commfuse_fx.inspect.explain.explanation import CollectiveReport, Explanation, ParameterLayout
    from commfuse_fx.inspect.explain.rank_memory import HeldBytes, RankMemory
    from commfuse_fx.inspect.explain_graphs import GraphsExplanation
    from commfuse_fx.inspect.lowered import Lowered
    from commfuse_fx.inspect.lowered_graphs import LoweredGraphs
    from commfuse_fx.ir.core.program import Note, Redistribution
    from commfuse_fx.machine.cluster import ClusterSpec, GroupSplit
    from commfuse_fx.machine.cluster_parts import Device, Level
    from commfuse_fx.machine.presets import preset_names, resolve_cluster
    from commfuse_fx.machine.step_profile import StepProfile
    from commfuse_fx.machine.timeline import Span, Timeline
    from commfuse_fx.measure.calibration import Calibration, calibrate
    from commfuse_fx.measure.calibration_report import CalibrationReport, LevelReport
    from commfuse_fx.planning.compiled import Collective, Snapshot
    from commfuse_fx.planning.pipeline.pipeline import PassRecord
    from commfuse_fx.runtime.ranks.joining.world import init
    from commfuse_fx.sharding.marking import plans
    from commfuse_fx.sharding.marking.shard import shard
    from commfuse_fx.sharding.rules.register import register_rule
    from commfuse_fx.simulate.events import Event, SimulatedCollective
    from commfuse_fx.simulate.simulation import Simulation
    from commfuse_fx.support.ranks import get_group_size, get_rank
    from commfuse_fx.virtual.lockstep import Lockstep, LockstepResult, lockstep
    from commfuse_fx.virtual.replicas import Disagreement

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "CalibrationReport",
    "CaptureError",
    "CheckpointError",
    "ClusterSpec",
    "Collective",
    "CollectiveCost",
    "CollectiveError",
    "CollectiveReport",
    "CommFuseError",
    "CompiledModule",
    "CompiledStep",
    "ConfigKeyError",
    "ConfigTypeError",
    "ConfigValueError",
    "Device",
    "Disagreement",
    "Event",
    "Explanation",
    "ForkError",
    "GraphDiff",
    "GraphsExplanation",
    "GroupSplit",
    "HeldBytes",
    "Level",
    "LevelReport",
    "Lockstep",
    "LockstepResult",
    "Lowered",
    "LoweredGraphs",
    "NotAvailableError",
    "NotThereError",
    "Note",
    "ParameterLayout",
    "PassRecord",
    "PeerFailedError",
    "PlanMismatchError",
    "RankMemory",
    "Redistribution",
    "Saving",
    "ScheduleConfig",
    "ShardedOptimizer",
    "SimulatedCollective",
    "Simulation",
    "Snapshot",
    "Span",
    "StepDifference",
    "StepProfile",
    "StrategyDiff",
    "Timeline",
    "TrialLimits",
    "VerificationError",
    "VerifiedStep",
    "VirtualWorldError",
    "calibrate",
    "collective_cost",
    "compile",
    "diff",
    "get_auto_parallel_context",
    "get_group_size",
    "get_rank",
    "init",
    "load",
    "lockstep",
    "ops",
    "plans",
    "preset_names",
    "register_rule",
    "reset_auto_parallel_context",
    "resolve_cluster",
    "set_auto_parallel_context",
    "set_comm_fusion",
    "shard",
]

_MODULES = {"ops": "commfuse_fx.ops", "plans": "commfuse_fx.sharding.marking.plans"}

_HOMES = {
    "commfuse_fx.api": ("compile",),
    "commfuse_fx.config.compile_config": ("ScheduleConfig", "TrialLimits"),
    "commfuse_fx.config.context": (
        "get_auto_parallel_context",
        "reset_auto_parallel_context",
        "set_auto_parallel_context",
    ),
    "commfuse_fx.config.fusion_marks": ("set_comm_fusion",),
    "commfuse_fx.cost.collective_cost": ("CollectiveCost", "collective_cost"),
    "commfuse_fx.frontends.module": ("CompiledModule",),
    "commfuse_fx.checkpoints.saving": ("Saving",),
    "commfuse_fx.frontends.sharded_optimizer": ("ShardedOptimizer",),
    "commfuse_fx.frontends.step": ("CompiledStep",),
    "commfuse_fx.calls.verified_step": ("StepDifference", "VerifiedStep"),
    "commfuse_fx.inspect.diff.diff_graphs": ("diff",),
    "commfuse_fx.inspect.diff.graph_diff": ("GraphDiff",),
    "commfuse_fx.inspect.diff.strategy_diff": ("StrategyDiff",),
    "commfuse_fx.inspect.diff.load": ("load",),
    "commfuse_fx.inspect.explain_graphs": ("GraphsExplanation",),
    "commfuse_fx.inspect.explain.explanation": ("CollectiveReport", "Explanation", "ParameterLayout"),
    "commfuse_fx.inspect.lowered": ("Lowered",),
    "commfuse_fx.inspect.lowered_graphs": ("LoweredGraphs",),
    "commfuse_fx.inspect.explain.rank_memory": ("HeldBytes", "RankMemory"),
    "commfuse_fx.ir.core.program": ("Note", "Redistribution"),
    "commfuse_fx.machine.cluster": ("ClusterSpec", "GroupSplit"),
    "commfuse_fx.machine.cluster_parts": ("Device", "Level"),
    "commfuse_fx.machine.presets": ("preset_names", "resolve_cluster"),
    "commfuse_fx.machine.step_profile": ("StepProfile",),
    "commfuse_fx.machine.timeline": ("Span", "Timeline"),
    "commfuse_fx.measure.calibration": ("Calibration", "calibrate"),
    "commfuse_fx.measure.calibration_report": ("CalibrationReport", "LevelReport"),
    "commfuse_fx.planning.compiled": ("Collective", "Snapshot"),
    "commfuse_fx.planning.pipeline.pipeline": ("PassRecord",),
    "commfuse_fx.runtime.ranks.joining.world": ("init",),
    "commfuse_fx.sharding.marking.shard": ("shard",),
    "commfuse_fx.sharding.rules.register": ("register_rule",),
    "commfuse_fx.simulate.events": ("Event", "SimulatedCollective"),
    "commfuse_fx.simulate.simulation": ("Simulation",),
    "commfuse_fx.support.ranks": ("get_group_size", "get_rank"),
    "commfuse_fx.virtual.lockstep": ("Lockstep", "LockstepResult", "lockstep"),
    "commfuse_fx.virtual.replicas": ("Disagreement",),
}
"""Where each name is defined: what the imports above say to type checkers. A test holds the two against each other."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

import_when_missed("commfuse_fx.planning.pipeline.registry")  # what graphs may call is made known by what passes import

if not TYPE_CHECKING:  # a checker that saw it would accept every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            found = import_module(_MODULES[name])
        elif name in _HOME_OF:
            found = getattr(import_module(_HOME_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
