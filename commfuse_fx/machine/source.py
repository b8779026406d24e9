"""What `cluster=` stands for: a cluster, or a profile of the very step."""

from __future__ import annotations

import hashlib

from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.presets import preset, resolve_cluster
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.support import documents

Costs = ClusterSpec | StepProfile


def resolve_costs(value: object, where: str = "cluster") -> Costs:
    """A ClusterSpec, a StepProfile, the name of a preset, or the path of a file that holds either.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError, which name `where`.
    """
    if documents.is_path(value):
        try:
            value = documents.load_document(value)
        except (ConfigTypeError, ConfigKeyError, ConfigValueError) as error:
            raise type(error)(f"{where}: {error.args[0]}") from None
    return value if isinstance(value, StepProfile) else resolve_cluster(value, where)


def cluster_of(costs: Costs) -> ClusterSpec:
    """The cluster, or that of the profile."""
    return costs if isinstance(costs, ClusterSpec) else costs.cluster


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
