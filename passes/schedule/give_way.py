"""Mark the nodes before which a step lets the backend's threads have the core that they share with it.

Gloo's threads move data on the core that computes. In class SCHED_BATCH, in which a step runs them, such a thread waits
until the step blocks, or until the kernel's tick ends the step's turn: 4 ms at 250 Hz. A ring all_reduce sends segments
of at most 1 MiB, two at a time, and each needs such a thread on both ranks. Beside unbroken compute it falls behind a
fast network. So while a collective is on its way, the step offers its core about twice a millisecond, between two
nodes; on a slow network less often, since every turn costs both sides what they had in the caches, and few bytes have
come since the last one.

Why: docs/decisions.md, "What is left of a step at 1 Gbit/s".
Why: docs/decisions.md, "A rank with one core shares it with Gloo's threads".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf

from torch import fx

from commfuse_fx.cost.model import cost_model
from commfuse_fx.cost.roofline import roofline_seconds
from commfuse_fx.cost.turns import turn_seconds
from commfuse_fx.ir.core.collectives import wait_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import execution_order
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.machine.source import cluster_of
from commfuse_fx.passes.declaration import Pass

_CORE = Device(name="core", flops={"f32": 1e11}, memory_bandwidth=2e10, memory_bytes=1 << 30, op_overhead=1e-5)
"""Tells about how long a node computes where no cluster was given."""


@dataclass(frozen=True)
class GiveWay(Pass):
    """An annotation: the graph and its text stay as they are."""

    name = "give_way"
    numerics = "bitwise"
    requires = ("averaged",)

    def __call__(self, program: Program) -> bool:
        found = turns(program)
        for node in found:
            info(node).gives_way = True
        return bool(found)


def turns(program: Program) -> list[fx.Node]:
    """The nodes before which to give way: one per `turn_seconds` of compute while a collective is in flight.

    Network and compute are those of the configuration's cluster; a fast one and a nominal core where it has none. In
    the order of one round of steps, in which what one step leaves to the following one stands before its anchor.
    """
    order = execution_order(program)
    costs = program.config.cluster
    levels = () if costs is None else cluster_of(costs).levels
    turn = turn_seconds(min((level.bandwidth for level in levels), default=inf))
    seconds_of = partial(roofline_seconds, device=_CORE) if costs is None else cost_model(costs).compute_seconds
    found: list[fx.Node] = []
    computed = 0.0
    for node, flying in zip(order, _in_flight(program, order), strict=True):
        seconds = seconds_of(node)
        if flying and seconds and computed >= turn:
            found.append(node)
            computed = 0.0
        computed += seconds
    return found


def _in_flight(program: Program, order: list[fx.Node]) -> list[int]:
    """How many collectives are in flight while each node of `order` runs."""
    place = {node: i for i, node in enumerate(order)}
    first = {start: place[start] for start in program.collectives()}
    for i, node in enumerate(order):
        for start, _ in info(node).sends:
            first[start] = min(first[start], i)
    change = [0] * (len(order) + 1)
    for start, sent in first.items():
        waited = place[wait_of(start)]
        change[sent + 1] += 1  # it leaves when that node has run
        change[waited] -= 1
        if waited < sent:  # in the following step
            change[0] += 1
    return list(accumulate(change[:-1]))
