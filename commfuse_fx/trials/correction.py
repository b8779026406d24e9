"""What trials teach: the network at which the predicted times of plans differ as the measured ones did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.simulate.rounds import play

FACTORS = tuple(2.0 ** (power / 4) for power in range(-4, 5))
"""How many times as long the network may take as it was measured to."""

BETTER = 0.8
"""A network takes the place of the measured one if it leaves at most so much unexplained of what that one does."""


def corrected(profile: StepProfile, tried: Sequence[tuple[Program, float]]) -> StepProfile:
    """The profile with a slower or faster network, if that explains better what the trials measured.

    tried: programs and the measured seconds of their steps; the others are compared with the first one. What a step
    takes besides its nodes and its communication is the same in all of them, and drops out. Nodes are measured by
    themselves, and the network by two seconds of probes: so only the network is corrected.
    """
    measured = [seconds - tried[0][1] for _, seconds in tried[1:]]

    def unexplained(factor: float) -> float:
        costs = CostModel(slower(profile.cluster, factor), profile.node_seconds)
        first, *others = (step_seconds(program, costs) for program, _ in tried)
        return sum((other - first - each) ** 2 for other, each in zip(others, measured, strict=True))

    errors = {factor: unexplained(factor) for factor in FACTORS}
    best = min(FACTORS, key=lambda factor: (errors[factor], abs(factor - 1)))
    if errors[best] > BETTER * errors[1.0]:
        return profile
    return replace(profile, cluster=slower(profile.cluster, best))


def slower(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The same cluster with a network that takes so many times as long for everything."""
    levels = tuple(
        replace(
            level,
            alpha=level.alpha * factor,
            alpha_busy=level.alpha_busy * factor,
            bandwidth=level.bandwidth / factor,
            bandwidth_busy=level.bandwidth_busy / factor,
            burst_bandwidth=level.burst_bandwidth / factor,
        )
        for level in cluster.levels
    )
    return replace(cluster, levels=levels)


def step_seconds(program: Program, costs: CostModel) -> float:
    """What a step takes in the long run, as the simulator has it."""
    played = play(program, costs)
    return played.ended - played.began
