"""What a step is priced with: the cluster or profile that was given, checked against the step, or a default.

Why: docs/decisions.md, "There is a default cluster, and several ranks measure their own".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import TensorSpec, dtype_name
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.source import Costs, cluster_of, default_cluster


def priced_for(costs: Costs | None, device: str, mesh: Mesh, params: Mapping[str, torch.Tensor | TensorSpec]) -> Costs:
    """What a step over this mesh is priced with: what was given, checked against it, or the default for the device.

    Raises ConfigValueError for a profile of another world or model, or a cluster without some of the ranks.
    """
    if costs is None:
        costs = default_cluster(device, mesh.world)
    if not isinstance(costs, ClusterSpec):
        costs.check(mesh.world, model_fingerprint(params))
    cluster_of(costs).check_ranks(range(mesh.world) if mesh.devices is None else mesh.devices)
    return costs


def model_fingerprint(params: Mapping[str, torch.Tensor | TensorSpec]) -> str:
    """SHA-256, in hex, of the names, shapes and dtypes of parameters, in their order."""
    lines = [f"{name} {dtype_name(p.dtype)} {tuple(int(size) for size in p.shape)}" for name, p in params.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
