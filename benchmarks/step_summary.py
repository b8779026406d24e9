"""The arithmetic of `step_time`: from seconds and bytes to medians, limits and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.step_task import Result, label

BASELINE = "DDP"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; one value is all three."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def slowest(per_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By name and position, the largest value of any rank: a step is over when its last rank is done."""
    return {name: [max(each) for each in zip(*(rank[name] for rank in per_rank), strict=True)] for name in per_rank[0]}


def pairwise(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the ratios of interleaved measurements."""
    return quartiles([a / b for a, b in zip(numerators, denominators, strict=True)])


def wire_seconds(nbytes: float, rate: float | None) -> float | None:
    """Seconds that `nbytes` take at `rate` Gbit/s; None without a rate."""
    return None if rate is None else nbytes * 8 / (rate * 1e9)


def limit_seconds(unlimited: float | None, wire: float | None) -> float | None:
    """What a step cannot be shorter than: its time on the unlimited network, and its bytes at the rate.

    None where neither is known.
    """
    known = [seconds for seconds in (unlimited, wire) if seconds is not None]
    return max(known) if known else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def rows(
    rates: Sequence[float | None], results: Sequence[Result]
) -> Iterator[tuple[float | None, str, dict[str, Any]]]:
    """(rate, variant, its `row`) of everything that the ranks measured."""
    unlimited: Mapping[str, Sequence[float]] = {}
    if None in rates:
        unlimited = slowest([result.at[label(None)].seconds for result in results])
    for rate in rates:
        at = [result.at[label(rate)] for result in results]
        times, sent = slowest([each.seconds for each in at]), slowest([each.wire_bytes for each in at])
        for name in times:
            nbytes = statistics.median(sent[name]) if name in sent else None
            figures = row(name, times, nbytes, rate, unlimited.get(name), at[0].predicted.get(name))
            yield rate, name, {**figures, "plan": at[0].plans.get(name)}


def row(
    name: str,
    times: Mapping[str, Sequence[float]],
    wire_bytes: float | None,
    rate: float | None,
    unlimited: Sequence[float] | None,
    simulated: float | None = None,
) -> dict[str, Any]:
    """The figures of one variant at one rate; seconds and bytes are per step.

    times: variant -> seconds per step, one for each block, interleaved with those of the others. wire_bytes: what
    the busiest rank sends. unlimited: this variant's blocks without a rate, interleaved with `times`. simulated: what
    was predicted. Unknown figures are None.
    """
    low, middle, high = quartiles(times[name])
    wire = None if wire_bytes is None else wire_seconds(wire_bytes, rate)
    limits = [limit_seconds(each, wire) for each in unlimited or [None] * len(times[name])]
    known = [each for each in limits if each is not None]
    to_limit = pairwise(times[name], known) if known else None
    against = pairwise(times[name], times[BASELINE]) if BASELINE in times else None
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "blocks": list(times[name]),
        "wire_bytes": wire_bytes,
        "wire_seconds": wire,
        "limit_seconds": statistics.median(known) if known else None,
        "ratio_to_limit": to_limit[1] if to_limit else None,
        "ratio_to_limit_quartiles": [to_limit[0], to_limit[2]] if to_limit else None,
        "ratio_to_ddp": against[1] if against else None,
        "ratio_to_ddp_quartiles": [against[0], against[2]] if against else None,
        "simulated_seconds": simulated,
        "ratio_simulated": None if simulated is None else simulated / middle,
    }


def errors(ratios: Iterable[float | None]) -> dict[str, Any] | None:
    """Of simulated over measured: how far they are off, as the median and the worst of |ratio - 1|; None of nothing."""
    off = [abs(ratio - 1) for ratio in ratios if ratio is not None]
    return {"cells": len(off), "median": statistics.median(off), "worst": max(off)} if off else None


def means_over_limited(rows: Iterable[tuple[str, float | None, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of (variant, rate, row): by variant, the geometric means of its ratios over all rows that have a rate.

    `cells` counts the rows behind `ratio_to_ddp`.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, rate, each in rows:
        if rate is not None:
            found.setdefault(name, []).append(each)
    means: dict[str, dict[str, Any]] = {}
    for name, several in found.items():
        to_ddp = [each["ratio_to_ddp"] for each in several if each["ratio_to_ddp"] is not None]
        to_limit = [each["ratio_to_limit"] for each in several if each["ratio_to_limit"] is not None]
        means[name] = {
            "ratio_to_ddp": geometric_mean(to_ddp),
            "ratio_to_limit": geometric_mean(to_limit),
            "cells": len(to_ddp),
        }
    return means
