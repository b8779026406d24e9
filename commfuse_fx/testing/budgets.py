"""Assert what a compiled step costs on a cluster, as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commfuse_fx.cost.collective_cost import bus_bandwidth
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.planning.compiled import Collective
from commfuse_fx.simulate.simulation import Simulation
from commfuse_fx.support.checks import check_number, show
from commfuse_fx.support.long_lists import shortened
from commfuse_fx.testing.check_lowered import check_lowered

_LISTED = 10


def assert_budget(
    lowered: Lowered,
    cluster: Any,
    *,
    max_exposed_seconds: float | None = None,
    max_wire_bytes: float | None = None,
    max_step_seconds: float | None = None,
    max_gap: float | None = None,
) -> None:
    """Assert that the step, simulated on a cluster, keeps within budgets.

    cluster: as for `lowered.simulate`: the name of a preset, a ClusterSpec, the path of a file, a profile.
    max_exposed_seconds: how long the step may stand still for communication.
    max_wire_bytes: bytes that a rank sends in a step, all collectives together (see `wire_bytes`).
    max_step_seconds: length of the step.
    max_gap: how far the step may be above its lower bound; 0.1 is 10 % longer.

    Raises AssertionError with each figure over its budget, and the collectives that cause it; ConfigTypeError,
    ConfigKeyError or ConfigValueError for a bad argument or cluster, and where no budget is given.
    """
    __tracebackhide__ = True
    where = "assert_budget"
    check_lowered(lowered, where)
    given = {
        "max_exposed_seconds": max_exposed_seconds,
        "max_wire_bytes": max_wire_bytes,
        "max_step_seconds": max_step_seconds,
        "max_gap": max_gap,
    }
    budgets = {name: check_number(value, f"{where}: {name}") for name, value in given.items() if value is not None}
    if not budgets:
        raise ConfigValueError(f"{where} was given no budget; give at least one of {', '.join(given)}")
    step = lowered.simulate(cluster)
    sent = wire_bytes(lowered.collectives)
    figures = {
        "max_exposed_seconds": ("exposed communication", step.exposed_seconds, _ms),
        "max_wire_bytes": ("bytes on the wire", sent, _bytes),
        "max_step_seconds": ("step time", step.step_seconds, _ms),
        "max_gap": (f"gap to the lower bound of {_ms(step.bound_seconds)} ({step.bound_by})", step.gap, _percent),
    }
    over = [name for name, budget in budgets.items() if figures[name][1] > budget]
    if not over:
        return
    lines = []
    for name in over:
        label, figure, text = figures[name]
        lines.append(f"{label}: {text(figure)}, budget {text(budgets[name])} ({name})")
    lines.append(f"simulated on {_cluster_name(cluster)}")
    if over != ["max_wire_bytes"]:
        lines.extend(_exposed(step))
    if "max_wire_bytes" in over:
        lines.extend(_largest(lowered.collectives))
    raise AssertionError("\n".join(lines))


def wire_bytes(collectives: Sequence[Collective]) -> float:
    """Bytes that a rank sends at least for these collectives: payload times 2(k-1)/k for an all_reduce over k ranks,
    (k-1)/k for all_gather, reduce_scatter and all_to_all, 1 for a broadcast, as nccl-tests counts (doc/PERFORMANCE.md).
    """
    return sum(_sent(each) for each in collectives)


def _sent(each: Collective) -> float:
    # The payload moved in one second: the bus bandwidth is then the bytes that are sent.
    return bus_bandwidth(each.kind, each.bytes, len(each.group), 1.0)


def _cluster_name(cluster: Any) -> str:
    if cluster is None:
        return "the cluster that the step was compiled for, or the default"
    return cluster if isinstance(cluster, str) else show(getattr(cluster, "name", cluster))


def _exposed(step: Simulation) -> list[str]:
    found = sorted((each for each in step.collectives if each.exposed), key=lambda each: -each.exposed)
    if not found:
        return ["no collective is exposed"]
    lines = [
        f"  {each.name}: {_ms(each.exposed)} exposed, {_ms(each.hidden)} hidden: {each.reason}\n    {each.description}"
        for each in found
    ]
    title = f"{len(found)} of {len(step.collectives)} collective(s) are exposed, the longest first:"
    return [title, *shortened(lines, _LISTED, "  ... and {} more")]


def _largest(collectives: Sequence[Collective]) -> list[str]:
    found = sorted(collectives, key=lambda each: -_sent(each))
    lines = [f"  {each.kind}: {_bytes(_sent(each))} in {each.phase}" for each in found]
    return [f"{len(found)} collective(s), the largest first:", *shortened(lines, _LISTED, "  ... and {} more")]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6g} ms"


def _bytes(size: float) -> str:
    return f"{size:.0f} bytes"


def _percent(part: float) -> str:
    return f"{100 * part:.4g} %"
