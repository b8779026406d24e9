"""What `cluster=` stands for: a cluster, or a profile of the very step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.presets import preset

if TYPE_CHECKING:
    import torch

    from commfuse_fx.cost.model import CostModel
    from commfuse_fx.ir.mesh import Mesh
    from commfuse_fx.ir.meta import TensorSpec
    from commfuse_fx.machine.step_profile import StepProfile

Costs = Union[ClusterSpec, "StepProfile"]


def resolve_costs(value: Any, where: str = "cluster") -> Costs:
    """A ClusterSpec, a StepProfile, the name of a preset, or the path of a file that holds either.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError, which name `where`.
    """
    # Here, because a profile is measured by running programs, and programs know their configuration.
    from commfuse_fx.machine import step_profile

    cluster, measured = step_profile.resolve_costs(value, where)
    return cluster if measured is None else measured


def priced_for(costs: Costs | None, device: str, mesh: Mesh, params: Mapping[str, torch.Tensor | TensorSpec]) -> Costs:
    """What a step over this mesh is priced with: what was given, checked against it, or the default for the device.

    Raises ConfigValueError for a profile of another world or model, or a cluster without some of the ranks.
    """
    from commfuse_fx.machine.step_profile import model_fingerprint

    if costs is None:
        costs = default_cluster(device, mesh.world)
    if not isinstance(costs, ClusterSpec):
        costs.check(mesh.world, model_fingerprint(params))
    cluster_of(costs).check_ranks(range(mesh.world) if mesh.devices is None else mesh.devices)
    return costs


def cluster_of(costs: Costs) -> ClusterSpec:
    """The cluster, or that of the profile."""
    return costs if isinstance(costs, ClusterSpec) else costs.cluster


def cost_model(costs: Costs) -> CostModel:
    """Prices for compute nodes and collectives."""
    from commfuse_fx.cost.model import CostModel

    if isinstance(costs, ClusterSpec):
        return CostModel(costs)
    return CostModel(costs.cluster, costs.node_seconds)


def default_cluster(device: str, world: int) -> ClusterSpec:
    """What is assumed where nothing is given: 10 Gbit/s between CPU ranks, H100 nodes of 8 for CUDA."""
    if device != "cuda":
        return preset("gloo-10gbit")
    nodes = -(-world // 8)
    return preset("h100-node" if nodes == 1 else f"h100-ib-{nodes}")


def costs_label(costs: Costs) -> str:
    """Name and digest, for headers: plans made from other figures are other plans."""
    digest = hashlib.sha256(costs.to_json().encode()).hexdigest()[:12]
    kind = "cluster" if isinstance(costs, ClusterSpec) else "profile"
    return f"{kind} {cluster_of(costs).name} {digest}"
