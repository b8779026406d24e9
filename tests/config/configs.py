"""Values that tests of the configuration share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level

MIB = 1024 * 1024
KINDS = ["allreduce", "allgather", "reducescatter"]
AUTO = {"mode": "auto", "config": None}


def size(config: Any) -> dict[str, Any]:
    return {"mode": "size", "config": config}


def index(config: Any) -> dict[str, Any]:
    return {"mode": "index", "config": config}


def auto(config: Any) -> dict[str, Any]:
    return {"mode": "auto", "config": config}


def optimal(config: Any) -> dict[str, Any]:
    return {"mode": "optimal", "config": config}


CLUSTER = ClusterSpec(
    name="two",
    device=Device(name="core", flops={"f32": 1e9}, memory_bandwidth=1e9, memory_bytes=2**30, op_overhead=1e-6),
    levels=(Level(name="net", alpha=1e-5, bandwidth=1e9),),
    ranks=2,
)


def raises_naming(error: type[Exception], *parts: str):
    """A context in which `error` is raised with every part in its message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))
