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
from torch import fx

from commfuse_fx.cost.model import OVERHEAD, PER_ELEMENT, PER_VIEW, CostModel, profile_key, update_elements
from commfuse_fx.cost.roofline import is_free
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.dependence import written_nodes
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.naming import op_label
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure.clocks import HostClock, clock_of
from commfuse_fx.measure.undo import step_undone, undone
from commfuse_fx.runtime.execute.bindings import bound
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.recorded import as_recorded, computed
from commfuse_fx.simulate.rounds import play
from commfuse_fx.support.checks import check_int
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
        torch=torch.__version__,
        device=cluster.device.name,
    )


def with_overhead(
    profile: StepProfile,
    executor: Executor,
    inputs: Mapping[str, torch.Tensor],
    run: Callable[[], Any],
    finish: Callable[[], Any],
    rounds: int,
) -> StepProfile:
    """The profile with what real steps take longer than the simulation of the same program, if they do.

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
    played = play(executor.program, CostModel(profile.cluster, profile.node_seconds))
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
    if world == 1:
        return [mine]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found


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
    stopwatch = _Stopwatch(executor)
    measured: list[dict[str, float]] = []
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
        for _ in range(rounds + 1):
            with undone(executor, inputs):
                measured.append(stopwatch.round(executor.gather(inputs)))
    return {key: median(found[key] for found in measured[1:]) for key in measured[0]}


class _Stopwatch:
    """Runs a program node by node, in graph order, with a clock around every compute node."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.clock = clock_of(executor.devices)
        self.nodes = list(executor.program.graph.nodes)
        self.sends = executor.wire.sends()
        self.callables = {node: bound(executor._bind(node)) for node in self.nodes if node.op == "call_function"}
        self.computed = computed(executor.program)
        self.made_once = executor.made_once
        self.dead_after = self._lifetimes()

    def _lifetimes(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the values that nobody needs once it has run."""
        last_use = {value: node for node in self.nodes for value in node.all_input_nodes}
        dead: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node in last_use:
                dead.setdefault(last_use[node], []).append(node)
            elif node.op == "placeholder" or not written_nodes(node):
                dead.setdefault(node, []).append(node)
        return dead

    def round(self, given: Sequence[Any]) -> dict[str, float]:
        """One step. Its updates are applied; what the collectives left is forgotten if it fails."""
        try:
            seconds = self._run(given)
        except BaseException:
            self.executor.wire.abandon()
            self.executor.storage.pool.forget_memory()
            raise
        return self._by_key(seconds)

    def _run(self, given: Sequence[Any]) -> dict[fx.Node, float]:
        values: dict[fx.Node, Any] = {}
        taken: dict[fx.Node, tuple[Any, Any] | None] = {}
        inputs = iter(given)
        for node in self.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = self.executor.program.constants[str(node.target)]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                begin = self.clock.begin()
                value = self.callables[node](*args, **kwargs)
                end = self.clock.mark()
                values[node] = as_recorded(value, info(node).spec) if node in self.computed else value
                del value
                if is_start(node):
                    self._complete()
                elif not (is_wait(node) or info(node).once):
                    taken[node] = None if node in self.made_once else (begin, end)
                for send, storage in self.sends.get(node, ()):
                    send(values[storage])
                    self._complete()
                del args, kwargs
            for value in self.dead_after.get(node, ()):
                values.pop(value, None)
        self.clock.settle()
        return {node: 0.0 if marks is None else self.clock.seconds(*marks) for node, marks in taken.items()}

    def _complete(self) -> None:
        """Wait for whatever is on the wire. The graph's own wait comes later, and finds it done."""
        for flights in self.executor.wire._pending.values():
            for flight in flights:
                flight.work.wait()
        self.clock.settle()

    @staticmethod
    def _by_key(seconds: Mapping[fx.Node, float]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        updates: dict[str, list[tuple[float, int]]] = {}
        views: dict[str, list[float]] = {}
        for node, took in seconds.items():
            found.setdefault(profile_key(node), []).append(took / info(node).share)
            if is_free(node):
                views.setdefault(PER_VIEW + op_label(node.target), []).append(took)
            if info(node).phase == "update" and update_elements(node):
                updates.setdefault(PER_ELEMENT + op_label(node.target), []).append((took, update_elements(node)))
        rates = {key: sum(took for took, _ in each) / sum(count for _, count in each) for key, each in updates.items()}
        return {key: mean(each) for key, each in (*found.items(), *views.items())} | rates
