"""commfuse-fx: a graph compiler for distributed training in PyTorch."""

from commfuse_fx import ops
from commfuse_fx.api import compile
from commfuse_fx.config.compile_config import ScheduleConfig
from commfuse_fx.config.context import (
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from commfuse_fx.config.fusion_marks import set_comm_fusion
from commfuse_fx.errors import (
    CaptureError,
    CollectiveError,
    CommFuseError,
    ConfigKeyError,
    ConfigTypeError,
    ConfigValueError,
    ForkError,
    NotAvailableError,
    PeerFailedError,
    PlanMismatchError,
    VerificationError,
    VirtualWorldError,
)
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.inspect.diff.diff_graphs import diff
from commfuse_fx.inspect.diff.graph_diff import GraphDiff
from commfuse_fx.inspect.dumps.load import load
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.machine.cluster import ClusterSpec, Device, Level
from commfuse_fx.machine.presets import preset_names
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.compiled import Collective
from commfuse_fx.runtime.ranks.world import init
from commfuse_fx.sharding.marking import plans
from commfuse_fx.sharding.marking.shard import shard
from commfuse_fx.sharding.rules.register import register_rule
from commfuse_fx.simulate.simulation import Simulation
from commfuse_fx.support.ranks import get_group_size, get_rank
from commfuse_fx.virtual.lockstep import lockstep

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ClusterSpec",
    "Collective",
    "CollectiveError",
    "CommFuseError",
    "CompiledStep",
    "ConfigKeyError",
    "ConfigTypeError",
    "ConfigValueError",
    "Device",
    "ForkError",
    "GraphDiff",
    "Level",
    "Lowered",
    "NotAvailableError",
    "PeerFailedError",
    "PlanMismatchError",
    "ScheduleConfig",
    "Simulation",
    "StepProfile",
    "VerificationError",
    "VirtualWorldError",
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
    "set_auto_parallel_context",
    "set_comm_fusion",
    "shard",
]
