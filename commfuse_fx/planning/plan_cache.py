"""The graphs that a step keeps, and which of them serves a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commfuse_fx.capture.guards.forward_writes import ForwardWrite
from commfuse_fx.capture.guards.guards import Guards
from commfuse_fx.capture.guards.signature import Signature
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.program import Parameter
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.variants.shared_prices import Seconds

MAX_GRAPHS = 16
"""Graphs kept per compiled step; the least recently used one goes first."""


@dataclass(eq=False)
class Plan:
    """One graph, and what it was traced for. Whoever runs it keeps what runs it, by the plan itself.

    others: plans of the same module with another treatment of its gradients, as in `Situation`, and for losses that do
        not use some outputs, given by their numbers.
    config: the options that it was planned with; None: those of its planner. common: as in `Planner.planned_as`.
    parts: of an evaluation of parameters that are divided, what the training step has made of these.
    writes: the attributes that the forward sets, which a call of the graph sets as well.
    may_run: whether all tensors of the call are known to have memory; until then it has been read at most.
    """

    compiled: Compiled
    signature: Signature
    guards: Guards
    writes: tuple[ForwardWrite, ...] = ()
    flat_updates: bool = True
    opaque: str = ""
    others: dict[tuple[str, tuple[int, ...]], Plan] = field(default_factory=dict)
    config: CompileConfig | None = None
    common: Seconds | None = None
    parts: Mapping[str, Parameter] | None = None
    may_run: bool = False


@dataclass
class PlanCache:
    """Plans in the order in which they were last used. `last`: that of the last call."""

    _plans: list[Plan] = field(default_factory=list)
    last: Plan | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied step traces its own model."""
        return PlanCache, ()

    def __len__(self) -> int:
        return len(self._plans)

    def values(self) -> list[Plan]:
        return list(self._plans)

    def find(self, signature: Signature) -> Plan | None:
        """The plan for this signature whose guards hold."""
        for number in range(len(self._plans) - 1, -1, -1):
            plan = self._plans[number]
            if plan.signature == signature and plan.guards.hold():
                if number != len(self._plans) - 1:
                    self._plans.append(self._plans.pop(number))
                return plan
        return None

    def keep(self, plan: Plan) -> None:
        self._plans.append(plan)
        del self._plans[:-MAX_GRAPHS]

    def release_others(self, signature: Signature) -> None:
        """Let plans for a model of another structure hold nothing of it."""
        for plan in self._plans:
            if plan.signature.model != signature.model:
                plan.guards.release()

    def clear(self) -> None:
        self._plans.clear()
        self.last = None
