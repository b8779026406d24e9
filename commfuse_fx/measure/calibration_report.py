"""What a calibration reports: how well its figures describe what was measured, and where not to rely on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.measure.fit_alpha_beta import Burst, Sample

LARGE_ERROR = 0.5
"""Median relative error of all_reduce above which the figures of a level are not to be relied on."""


@dataclass(frozen=True)
class LevelReport:
    """The report of a level says how well its figures describe what was measured.

    name: of the level.
    groups: the ranks that were measured together.
    alpha: seconds that a message takes before its first byte arrives.
    bandwidth: bytes per second that the level carries on and on, with several collectives in flight as in a
        training step.
    fitted_bandwidth: what single collectives would give, which end before buffers and the allowances of a
        network are used up.
    burst: what the level carries at once after a pause.
    host_seconds_per_byte: seconds of compute that a byte costs.
    overhead: seconds of compute that a message costs besides its bytes.
    alpha_busy: `alpha` while the ranks compute; 0 where that makes no difference.
    bandwidth_busy: `bandwidth` while the ranks compute; 0 where that makes no difference.
    median_error, max_error: |predicted / measured - 1| over the samples.
    kind_errors: the median error by kind of collective.
    samples: the slowest rank's medians.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    alpha: float
    bandwidth: float
    fitted_bandwidth: float
    burst: Burst
    host_seconds_per_byte: float
    overhead: float
    alpha_busy: float
    bandwidth_busy: float
    median_error: float
    max_error: float
    kind_errors: Mapping[str, float]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class CalibrationReport:
    """The report says how a cluster was measured.

    world: the number of ranks.
    backend: the backend of torch.distributed.
    torch: the version of torch.
    seconds: how long the whole calibration took.
    device: what one rank computes with, as measured.
    levels: how well the figures of each level of the network fit.
    """

    world: int
    backend: str
    torch: str
    seconds: float
    device: Device
    levels: tuple[LevelReport, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The reasons why figures are not to be relied on, each with what to do about it."""
        return tuple(
            f"level {level.name}: the median error of all_reduce is {level.kind_errors['all_reduce']:.0%}, far above "
            "the usual 30%; calibrate again with nothing else running, and more --seconds"
            for level in self.levels
            if level.kind_errors["all_reduce"] > LARGE_ERROR
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dictionaries, for JSON. Units are those of the fields."""
        found: dict[str, Any] = asdict(replace(self, device=replace(self.device, flops=dict(self.device.flops))))
        return {**found, "warnings": list(self.warnings)}

    def text(self) -> str:
        """The report in plain lines."""
        device = self.device
        flops = ", ".join(f"{value / 1e9:.1f} GFLOP/s {name}" for name, value in device.flops.items())
        lines = [
            f"calibrated {self.world} ranks over {self.backend} in {self.seconds:.1f} s (torch {self.torch})",
            f"device: {device.name}",
            f"  {flops}",
            f"  memory {device.memory_bandwidth / 1e9:.2f} GB/s, {device.memory_bytes / 2**30:.1f} GiB a rank; "
            f"op overhead {device.op_overhead * 1e6:.2f} us",
        ]
        for level in self.levels:
            kinds = ", ".join(f"{kind} {error:.0%}" for kind, error in level.kind_errors.items())
            lines += [
                f"level {level.name}: {' and '.join(str(len(group)) for group in level.groups)} ranks",
                f"  alpha {level.alpha * 1e6:.1f} us, bandwidth {level.bandwidth / 1e9:.3f} GB/s (one collective at "
                f"a time: {level.fitted_bandwidth / 1e9:.3f})",
            ]
            if level.burst.nbytes:
                found = level.burst
                lines.append(f"  after a pause {found.nbytes / 1e6:.2f} MB at {found.bandwidth / 1e9:.3f} GB/s")
            lines += [
                f"  host {level.host_seconds_per_byte * 1e9:.3f} ns of compute per byte, "
                f"{level.overhead * 1e6:.1f} us per message",
                f"  while computing alpha {(level.alpha_busy or level.alpha) * 1e6:.1f} us, bandwidth "
                f"{(level.bandwidth_busy or level.bandwidth) / 1e9:.3f} GB/s",
                f"  fit: relative error {level.median_error:.0%} median, {level.max_error:.0%} at most, "
                f"over {len(level.samples)} samples; median of {kinds}",
            ]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines) + "\n"
