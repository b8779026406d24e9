"""Measure a `StepProfile`: the compute of one step, node by node, on the running ranks.

While it is measured every collective ends where it begins, so that no node is slowed by what is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.cost.model import OVERHEAD, cost_model, profile_key
from commfuse_fx.cost.roofline import roofline_seconds
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure.clocks import HostClock, clock_of
from commfuse_fx.measure.stopwatch import Stopwatch
from commfuse_fx.measure.undo import step_undone, undone
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.simulate.rounds import play
from commfuse_fx.support.checks import check_int
from commfuse_fx.support.objects import gather_objects
from commfuse_fx.support.ranks import is_distributed

MOST_STEPS = 40
"""Whole steps that are timed at most."""

BLOCKS = 8
"""Of consecutive steps, whose mean counts: at least so many, where there are as many steps."""


def profile_step(
    executor: Executor, inputs: Mapping[str, torch.Tensor], cluster: ClusterSpec, rounds: int, model_fingerprint: str
) -> StepProfile:
    """Measure a step on all ranks, which must call this together. The profile is the same on all of them.

    executor: bound to its storage, of a step that no rank is in. inputs: as for `Executor.run`. cluster: what
    collectives cost. model_fingerprint: what the function of that name gives for the parameters. Each value is the
    median over the ranks.
    Leaves parameters, buffers, optimizer state and random number generators as they were.
    """
    world = dist.get_world_size() if is_distributed() and executor.program.mesh.world > 1 else 1
    _gather(None, world)  # start together
    everybody = _gather(measure_step(executor, inputs, rounds), world)
    seconds = {key: median(each[key] for each in everybody if key in each) for key in everybody[0]}
    return StepProfile(
        cluster=cluster,
        world=executor.program.mesh.world,
        model=model_fingerprint,
        node_seconds=seconds,
        node_roofline=roofline_by_key(executor.program, cluster.device, seconds),
        torch=torch.__version__,
        device=cluster.device.name,
    )


def roofline_by_key(program: Program, device: Device, measured: Mapping[str, float]) -> dict[str, float]:
    """What the roofline says of the nodes that were measured. Nodes with one key share their mean, as in
    `measure_step`; what takes no time by it has no entry."""
    found: dict[str, list[float]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and profile_key(node) in measured and not info(node).once:
            found.setdefault(profile_key(node), []).append(roofline_seconds(node, device) / info(node).share)
    return {key: mean(each) for key, each in found.items() if any(each)}


def with_overhead(
    profile: StepProfile,
    executor: Executor,
    inputs: Mapping[str, torch.Tensor],
    run: Callable[[], Any],
    finish: Callable[[], Any],
    rounds: int,
) -> StepProfile:
    """The profile with what real steps take longer than the simulation of the same program, if they do.

    It is one sum for the whole step, spread over its nodes: at the begin of a step it would seem to hide what the step
    before has left, and a factor for all nodes predicts worse.

    run: one step; rounds: how many are timed at least; finish: waits for what they leave on the wire. The slowest rank
    counts, by `typical` of the steps. Leaves parameters, gradients, buffers, optimizer state and random number
    generators as they were. All ranks together.
    """
    world = dist.get_world_size() if is_distributed() and profile.world > 1 else 1
    clock = clock_of(executor.devices)
    with step_undone(executor, inputs):
        run()
        first = _periods(run, 1, clock)[0]
        # Short steps vary more from one to the next: all ranks take as many of them as fit into a second.
        fitting = int(1 / max(_gather(first, world)))
        times = _periods(run, max(rounds, min(fitting, MOST_STEPS)), clock)
        finish()
    everybody = _gather(typical(times), world)
    played = play(executor.program, cost_model(profile))
    overhead = max(max(everybody) - (played.ended - played.began), 0.0)
    return replace(profile, node_seconds={**profile.node_seconds, OVERHEAD: overhead})


def typical(times: Sequence[float]) -> float:
    """What a step takes in the long run: the median of the means of blocks of consecutive steps.

    A step that was disturbed is as much a part of training as the others, but one long pause of the machine is not
    (source: median of means, Nemirovsky and Yudin, "Problem complexity and method efficiency in optimization", 1983).
    """
    size = max(len(times) // BLOCKS, 1)
    return median(mean(times[at : at + size]) for at in range(0, len(times) - size + 1, size))


def _periods(run: Callable[[], Any], count: int, clock: HostClock) -> list[float]:
    """Seconds of each of some consecutive steps."""
    marks = [clock.mark()]
    for _ in range(count):
        run()
        marks.append(clock.mark())
    clock.settle()
    return [clock.seconds(begin, end) for begin, end in pairwise(marks)]


def _gather(mine: Any, world: int) -> list[Any]:
    """What every rank has, in a world of several."""
    return [mine] if world == 1 else gather_objects(mine)


def measure_step(executor: Executor, inputs: Mapping[str, torch.Tensor], rounds: int = 5) -> dict[str, float]:
    """Seconds of each compute node of a step on this rank, by `profile_key`: medians over `rounds` rounds.

    One more round goes before them and does not count. Nodes with one key share their mean. Updates also give
    `update.per_element/<op>`, seconds per element of the parameters, and ops that move no data `view.each/<op>`, the
    mean of all their nodes. All ranks of the program's world must call it together. Leaves parameters, buffers,
    optimizer state and random number generators as they were, with copies of them in memory meanwhile. Raises
    ConfigTypeError or ConfigValueError for bad rounds, and what the step raises.
    """
    check_int(rounds, "rounds", 1)
    executor.synchronize()
    stopwatch = Stopwatch(executor)
    measured: list[dict[str, float]] = []
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
        for _ in range(rounds + 1):
            with undone(executor, inputs):
                measured.append(stopwatch.run(executor.gather(inputs))[1])
    return {key: median(found[key] for found in measured[1:]) for key in measured[0]}
