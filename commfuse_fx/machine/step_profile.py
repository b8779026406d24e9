"""What one step's compute really takes: a cluster plus the seconds of every compute node of one model.

A profile is taken wherever a cluster is; `CompiledStep.profile` measures it.

Why: docs/decisions.md, "A profile is keyed by the names of nodes".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.bounds import MOST_RANKS, NODE_SECONDS
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.support.checks import check_int, check_text, show
from commfuse_fx.support.documents import Document, check_keys, document_data, document_of_data, made_of
from commfuse_fx.support.strict_json import check_object

_KEYS = ("cluster", "world", "model", "torch", "device", "node_seconds")


@dataclass(frozen=True, kw_only=True)
class StepProfile(Document, kind="profile"):
    """A profile is what the compute of one model's step takes on one cluster. `CompiledStep.profile` measures it.

    cluster: what the collectives cost.
    world: the number of ranks that it was measured on.
    model: a fingerprint of the parameters' names, shapes and dtypes, 64 hex digits.
    node_seconds: seconds of every compute node by name, with nothing on the wire. Other keys are
        `update.per_element/<op>` (seconds per element of the parameters that an update works on), `view.each/<op>`
        (of nodes that move no data and have no entry) and `step.overhead` (what a step takes besides).
    node_roofline: what the roofline of the cluster's device says of the same nodes, in seconds by name. A plan in which
        they are other parts of divided ops counts so much more or less for them. May be empty.
    torch, device: the version and the device that it was measured with.
    plan: the name of the plan that a step with `schedule="auto"` has come to stay with; "" if it was not tried.
    step_seconds: what a step with that plan took, on the slowest rank; 0 if that is not known.

    Raises ConfigTypeError or ConfigValueError, which name the field.
    """

    cluster: ClusterSpec
    world: int
    model: str
    node_seconds: Mapping[str, float] = field(hash=False)
    torch: str = ""
    device: str = ""
    plan: str = ""
    step_seconds: float = 0.0
    node_roofline: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cluster, ClusterSpec):
            raise ConfigTypeError(f"cluster is {show(self.cluster)}; give a ClusterSpec")
        check_int(self.world, "world", 1, MOST_RANKS)
        if not re.fullmatch("[0-9a-f]{64}", check_text(self.model, "model")):
            raise ConfigValueError(f"model is {show(self.model)}; give the 64 hex digits of model_fingerprint()")
        object.__setattr__(self, "node_seconds", _by_name(self.node_seconds, "node_seconds"))
        if not self.node_seconds:
            raise ConfigValueError("node_seconds is empty; measure at least one step")
        object.__setattr__(self, "node_roofline", _by_name(self.node_roofline, "node_roofline"))
        check_text(self.torch, "torch", empty=True)
        check_text(self.device, "device", empty=True)
        check_text(self.plan, "plan", empty=True)
        object.__setattr__(self, "step_seconds", NODE_SECONDS.check(self.step_seconds, "step_seconds"))

    def check(self, world: int, model: str) -> None:
        """Raise ConfigValueError unless this is a profile of that model (a fingerprint) on so many ranks."""
        if (world, model) != (self.world, self.model):
            raise ConfigValueError(
                f"profile for another world or model: it was measured on {self.world} rank(s) with parameters "
                f"{self.model[:12]}, this step has {world} rank(s) and parameters {model[:12]}; measure this step, or "
                "give the profile's cluster alone"
            )

    def _body(self) -> Mapping[str, Any]:
        return {
            "cluster": document_data(self.cluster),
            "world": self.world,
            "model": self.model,
            "torch": self.torch,
            "device": self.device,
            **({"plan": self.plan} if self.plan else {}),
            **({"step_seconds": self.step_seconds} if self.step_seconds else {}),
            "node_seconds": dict(self.node_seconds),
            **({"node_roofline": dict(self.node_roofline)} if self.node_roofline else {}),
        }

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> StepProfile:
        check_keys(body, where, _KEYS, ("plan", "step_seconds", "node_roofline"))
        cluster = document_of_data(ClusterSpec, body["cluster"], f"{where}: cluster")
        check_object(body["node_seconds"], f"{where}: node_seconds")
        check_object(body.get("node_roofline", {}), f"{where}: node_roofline")
        return made_of(cls, {**body, "cluster": cluster}, where)


def _by_name(value: object, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{where} is {show(value)}; give seconds by the name of a node")
    return {
        check_text(key, f"a key of {where}"): NODE_SECONDS.check(each, f"{where}[{show(key)}]")
        for key, each in value.items()
    }
