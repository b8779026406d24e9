"""Mode "optimal" on whole small graphs, run through the real passes, against every plan there is.

Every partition of the collectives into buckets, in every order of issue, is made into a program by the same passes and
played by the same simulator. Where only computing and one FIFO stream count (nothing is copied, no core is shared, one
price line for all sizes) the step is as short as the shortest of them. Elsewhere it is compared with narrower classes
of plans: see each test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import commfuse_fx as cf
from commfuse_fx.compiler import Variant, build_pipeline, plan_step
from commfuse_fx.config import CompileConfig
from commfuse_fx.cost.rounds import play
from commfuse_fx.cost.source import cost_model
from commfuse_fx.ir.collectives import WAIT, c10d
from commfuse_fx.ir.dependence import Dependence
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.meta import CollectiveInfo, NodeInfo, TensorSpec, info, set_info
from commfuse_fx.ir.order import reorder, stable_sort
from commfuse_fx.ir.program import OptimizerGroup, OptimizerInfo, Parameter, Program, Source

aten = torch.ops.aten

OPTIMAL: dict[str, Any] = {"allreduce": {"mode": "optimal", "config": None}}
APART: dict[str, Any] = {"openstate": False}
BY_ID: dict[str, Any] = {"openstate": True}
BY_SIZE: list[dict[str, Any]] = [
    {"allreduce": {"mode": "size", "config": mib}} for mib in (1, 2, 4, 8, 16, 25, 32, 64, 1024)
]

SGD = OptimizerInfo(
    "sgd", "SGD", (), "momentum dampening nesterov maximize weight_decay"
)
