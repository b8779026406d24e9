"""From measured collectives to the latency and the bandwidth of a level.

The model is that of `commfuse_fx.cost.collective_cost` (Hockney, 1994): a collective with m messages that follow one
another and b bytes from its busiest rank takes m * alpha + b / bandwidth seconds. m and b are those of the
ring, and of the binomial tree for broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from commfuse_fx.cost.collective_formulas import Work, all_reduce_ring, rooted_binomial, shards_ring
from commfuse_fx.errors import ConfigValueError


@dataclass(frozen=True)
class Sample:
    """One measured collective.

    kind: "all_reduce", "all_gather", "reduce_scatter" or "broadcast"; ranks: members of its group; nbytes: bytes of
    the full, unsharded buffer; seconds: how long it took; weight: how much it counts in a fit.
    """

    kind: str
    ranks: int
    nbytes: int
    seconds: float
    weight: float = 1.0

    @property
    def messages(self) -> int:
        """How many times the latency is paid."""
        return _work(self).messages

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends; for broadcast, the bytes that pass one after another along the tree."""
        return _work(self).share * self.nbytes


@dataclass(frozen=True)
class Fit:
    """A fit is a line through measured messages.

    alpha: seconds per message.
    bandwidth: bytes per second.
    errors: |fitted / measured - 1| of each sample.
    """

    alpha: float
    bandwidth: float
    errors: tuple[float, ...]

    def seconds_of(self, sample: Sample) -> float:
        """What such a collective takes by these figures."""
        return _predicted(sample, self.alpha, self.bandwidth)

    @property
    def median_error(self) -> float:
        return median(self.errors)

    @property
    def max_error(self) -> float:
        return max(self.errors)


LEAST_BOOST = 1.5
"""How many times as fast as its bandwidth a link must be after a pause to count as one with bursts."""

MOST_GROWTH = 2.0
"""How many times as much a larger collective may gain from a pause than a smaller one that gained from it. A bucket is
empty some time; what is faster alone than in a row, for want of a core, gains with every byte."""


@dataclass(frozen=True)
class Burst:
    """What a link carries at once after a pause: bytes, and bytes per second; 0 and 0 where it has no bursts."""

    nbytes: float = 0.0
    bandwidth: float = 0.0


def burst(rested: Sequence[Sample], bandwidth: float, alpha: float = 0.0) -> Burst:
    """The token bucket that collectives after a pause show, in front of a link of this many bytes per second.

    rested: single collectives, each after a pause, from small to large. alpha: seconds of a message's latency. The
    bucket is what a large one has moved beyond the bandwidth, its speed that of the fastest one, latency included.
    """
    fastest = max(sample.wire_bytes / sample.seconds for sample in rested)
    *_, gained, most = (s.wire_bytes - bandwidth * (s.seconds - s.messages * alpha) for s in rested)
    if fastest < LEAST_BOOST * bandwidth or not 0 < most <= MOST_GROWTH * gained:
        return Burst()
    return Burst(max(gained, most), fastest)


def fit(samples: Sequence[Sample], bandwidth: float | None = None) -> Fit:
    """The non-negative alpha and the bandwidth with the least weighted sum of squared relative errors.

    An error is relative to the geometric mean of the fitted and the measured time. So a message of 1 KiB counts as
    much as one of 32 MiB, and half the time as much as twice the time. `bandwidth` (bytes per second): take this one,
    and fit alpha only. Where the samples show no dependence on size, the bandwidth is the highest that any of them
    reached. Raises ConfigValueError for fewer than two samples, or times that are not positive.
    """
    if len(samples) < 2:
        raise ConfigValueError(f"samples: {len(samples)} cannot give a latency and a bandwidth; measure two sizes")
    for sample in samples:
        if not (sample.seconds > 0 and sample.wire_bytes > 0 and sample.weight > 0):
            raise ConfigValueError(f"samples: {sample} needs two ranks or more, and positive bytes, seconds, weight")
    top = max(s.wire_bytes / s.seconds for s in samples)
    weights = [s.weight for s in samples]
    alpha, chosen = 0.0, bandwidth or top
    for _ in range(_ROUNDS):
        if bandwidth is None:
            alpha, per_byte = _least_squares(samples, weights)
            chosen = 1 / per_byte if per_byte > 0 else top
        else:
            alpha = _alpha_for(samples, weights, bandwidth)
        weights = [s.weight * s.seconds / _predicted(s, alpha, chosen) for s in samples]
    return Fit(alpha, chosen, tuple(abs(_predicted(s, alpha, chosen) / s.seconds - 1) for s in samples))


_ROUNDS = 20
"""Least squares are weighted anew by the last fit this often (iteratively reweighted least squares)."""


def _predicted(sample: Sample, alpha: float, bandwidth: float) -> float:
    return sample.messages * alpha + sample.wire_bytes / bandwidth


_FORMULAS = {
    "all_reduce": all_reduce_ring,
    "all_gather": shards_ring,
    "reduce_scatter": shards_ring,
    "broadcast": rooted_binomial,
}


def _work(sample: Sample) -> Work:
    if sample.kind not in _FORMULAS:
        raise ConfigValueError(f"kind={sample.kind!r} cannot be fitted: use one of {', '.join(_FORMULAS)}")
    return _FORMULAS[sample.kind](sample.ranks)


def _least_squares(samples: Sequence[Sample], weights: Sequence[float]) -> tuple[float, float]:
    """(alpha, seconds per byte) from the normal equations of x * alpha + y * per_byte = 1."""
    # Bytes in units of the largest sample: the two columns then are of like size.
    unit = max(s.wire_bytes for s in samples)
    rows = [(s.messages / s.seconds, s.wire_bytes / unit / s.seconds, w) for s, w in zip(samples, weights, strict=True)]
    xx = sum(w * x * x for x, _, w in rows)
    xy = sum(w * x * y for x, y, w in rows)
    yy = sum(w * y * y for _, y, w in rows)
    x1 = sum(w * x for x, _, w in rows)
    y1 = sum(w * y for _, y, w in rows)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        return 0.0, y1 / yy / unit  # all samples have one size: it cannot be told apart
    alpha = (x1 * yy - y1 * xy) / determinant
    per_unit = (xx * y1 - xy * x1) / determinant
    if alpha < 0:
        return 0.0, y1 / yy / unit
    if per_unit < 0:
        return x1 / xx, 0.0
    return alpha, per_unit / unit


def _alpha_for(samples: Sequence[Sample], weights: Sequence[float], bandwidth: float) -> float:
    """The best alpha >= 0 beside a given bandwidth."""
    rows = [
        (s.messages / s.seconds, 1 - s.wire_bytes / bandwidth / s.seconds, w)
        for s, w in zip(samples, weights, strict=True)
    ]
    return max(0.0, sum(w * x * rest for x, rest, w in rows) / sum(w * x * x for x, _, w in rows))
