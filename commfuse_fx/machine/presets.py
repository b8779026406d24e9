"""Clusters that can be named: typical networks, with figures from vendors' data and public measurements.

A preset says what is usual for such hardware, not what one machine does. Where a decision hangs on a few per cent,
measure the machine and give its own cluster. Sources that begin with "estimate" are our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level
from commfuse_fx.support import documents
from commfuse_fx.support.checks import show

GPUS_PER_NODE = 8
MAX_NODES = 512
"""Largest <n> of h100-ib-<n> and a100-ib-<n>; 4096 ranks."""

_CPU_CORE = Device(
    name="server CPU core",
    flops={"f64": 30e9, "f32": 60e9, "bf16": 20e9, "f16": 10e9},
    memory_bandwidth=10e9,
    memory_bytes=8 << 30,
    op_overhead=4e-6,
    collective_overhead=8e-5,
    source=(
        "estimate: a 3 GHz core with two 256-bit FMA units (96 GFLOP/s of f32 at peak) that reaches 60 % of it, its "
        "share of the memory channels, half-precision types converted on the way, an eager PyTorch op, Gloo's threads "
        "being woken for a message"
    ),
)


def _gpu(name: str, full: float, half: float, memory_bandwidth: float, source: str) -> Device:
    """An NVIDIA GPU with 80 GB. full, half: FLOP/s in f64 and f32, and in bf16 and f16."""
    return Device(
        name=f"{name} 80 GB",
        flops={"f64": full, "f32": full, "bf16": half, "f16": half},
        memory_bandwidth=memory_bandwidth,
        memory_bytes=80 * 10**9,
        op_overhead=5e-6,
        collective_overhead=5e-6,
        source=f"{source} of these, an eager kernel, or the launch of a collective, takes 5 us",
    )


_A100_SOURCE = (
    "NVIDIA A100 datasheet: 19.5 TFLOP/s f64 (tensor cores) and f32, 312 TFLOP/s bf16 and f16 without sparsity, "
    "{} TB/s, 80 GB; estimate: large products reach 80 % and streams 90 %"
)

_H100 = _gpu(
    "H100 SXM5",
    47e12,
    692e12,
    3.0e12,
    "NVIDIA H100 datasheet: 67 TFLOP/s f64 (tensor cores) and f32, 989 TFLOP/s bf16 and f16 without sparsity, "
    "3.35 TB/s, 80 GB; estimate: large products reach 70 % and streams 90 %",
)
_A100 = _gpu("A100 SXM4", 15.6e12, 250e12, 1.84e12, _A100_SOURCE.format("2.039"))
_A100_PCIE = _gpu("A100 PCIe", 15.6e12, 250e12, 1.74e12, _A100_SOURCE.format("1.935"))

_NCCL_LATENCY = "alpha: NCCL's tuning table (src/graph/tuning.cc), ring with protocol Simple, {}"

_H100_NVSWITCH = Level(
    name="nvlink",
    domains=GPUS_PER_NODE,
    alpha=3.4e-6,
    bandwidth=370e9,
    source=(
        "bandwidth: what NCCL reaches of the 450 GB/s of NVLink 4 with rings, NVIDIA in nccl-tests issue 212; "
        + _NCCL_LATENCY.format("NVLink")
    ),
)

_A100_NVSWITCH = Level(
    name="nvlink",
    domains=GPUS_PER_NODE,
    alpha=3.4e-6,
    bandwidth=235e9,
    source=(
        "bandwidth: the cap that NCCL's tuning model first had for A100 (NVLink 3 has 300 GB/s), src/graph/tuning.cc; "
        + _NCCL_LATENCY.format("NVLink")
    ),
)

_PCIE = Level(
    name="pcie",
    alpha=5.7e-6,
    bandwidth=20e9,
    source=(
        "bandwidth: measured between A100 over the host bridges, nccl-tests issue 178 (PCIe 4.0 x16 carries "
        "31.5 GB/s after encoding); " + _NCCL_LATENCY.format("PCI")
    ),
)

_NDR = Level(
    name="infiniband",
    alpha=14e-6,
    bandwidth=47e9,
    source=(
        "bandwidth: 46 to 48 GB/s per 400 Gbit/s NDR adapter, one per GPU, NVIDIA in nccl-tests issue 290; "
        + _NCCL_LATENCY.format("network")
    ),
)

_HDR = Level(
    name="infiniband",
    alpha=14e-6,
    bandwidth=23.5e9,
    source=(
        "bandwidth: estimate: 94 % of the 25 GB/s of a 200 Gbit/s HDR adapter, one per GPU; nccl-tests issues 100 and "
        "119 measure 91 and 96 GB/s over four; " + _NCCL_LATENCY.format("network")
    ),
)


def _ethernet(gbit: int, alpha: float) -> ClusterSpec:
    level = Level(
        name="tcp",
        alpha=alpha,
        bandwidth=round(gbit * 1e9 / 8 * 1448 / 1538, -3),
        host_seconds_per_byte=0.45e-9,
        source=(
            f"bandwidth: {gbit} Gbit/s less the headers of Ethernet, IP and TCP (1448 of 1538 bytes with an MTU of "
            "1500); estimate: the latency of a message through two kernels and Gloo's threads, and 0.45 ns of a core "
            "per byte that Gloo copies and adds"
        ),
    )
    return ClusterSpec(name=f"gloo-{gbit}gbit", device=_CPU_CORE, levels=(level,))


def _nodes(name: str, count: int, device: Device, *levels: Level) -> ClusterSpec:
    return ClusterSpec(name=name, device=device, levels=levels, ranks=GPUS_PER_NODE * count)


_FIXED: Mapping[str, Callable[[], ClusterSpec]] = MappingProxyType(
    {
        "gloo-1gbit": lambda: _ethernet(1, 60e-6),
        "gloo-10gbit": lambda: _ethernet(10, 40e-6),
        "gloo-25gbit": lambda: _ethernet(25, 30e-6),
        "h100-node": lambda: _nodes("h100-node", 1, _H100, _H100_NVSWITCH),
        "a100-node": lambda: _nodes("a100-node", 1, _A100, _A100_NVSWITCH),
        "pcie-node": lambda: _nodes("pcie-node", 1, _A100_PCIE, _PCIE),
    }
)
_SCALED: Mapping[str, tuple[Device, Level, Level]] = MappingProxyType(
    {"h100-ib": (_H100, _H100_NVSWITCH, _NDR), "a100-ib": (_A100, _A100_NVSWITCH, _HDR)}
)


def preset_names() -> tuple[str, ...]:
    """The names of presets. Of h100-ib-<n> and a100-ib-<n> those with n a power of two are listed; any n in 2..512
    works.
    """
    counts = [2**i for i in range(1, MAX_NODES.bit_length())]
    return (*_FIXED, *(f"{family}-{count}" for family in _SCALED for count in counts))


def preset(name: str) -> ClusterSpec:
    """The cluster of that name; docs/cost.md has the figures.

    gloo-1gbit, gloo-10gbit, gloo-25gbit: one rank per host over TCP, any number of ranks. h100-node, a100-node: 8 GPUs
    joined by NVSwitch. h100-ib-<n>, a100-ib-<n>: n such nodes, 2..512, with an InfiniBand adapter per GPU. pcie-node:
    8 GPUs over PCIe 4.0.

    Raises ConfigTypeError when the name is no str, ConfigValueError when no preset has it.
    """
    return _preset(name, "preset")


def resolve_cluster(value: object, where: str = "cluster") -> ClusterSpec:
    """The cluster that an option stands for.

    value: a ClusterSpec, the name of a preset, or the path of a JSON file. A str is a path when it ends with
        .json or has a separator.
    where: the name of the option, for errors.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError.
    """
    if isinstance(value, ClusterSpec):
        return value
    if isinstance(value, str) and not documents.is_path(value):
        return _preset(value, where)
    if not documents.is_path(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give a ClusterSpec, the name of a preset, or a path")
    loaded: Any = documents.load_document(value)
    if not isinstance(loaded, ClusterSpec):
        raise ConfigTypeError(f"{where} is {show(value)}, a file that describes no cluster; give one that does")
    return loaded


def _preset(name: object, where: str) -> ClusterSpec:
    if not isinstance(name, str):
        raise ConfigTypeError(f'{where} is {show(name)}; give a str such as "h100-node"')
    if name in _FIXED:
        return _FIXED[name]()
    scaled = re.fullmatch(r"(.+?)-(-?[0-9]+)", name)
    if scaled and scaled[1] in _SCALED:
        # Longer numbers than the largest allowed one are out of range anyway, and may be too long for int().
        count = int(scaled[2]) if len(scaled[2]) <= 4 else MAX_NODES + 1
        if not 2 <= count <= MAX_NODES or str(count) != scaled[2]:
            raise ConfigValueError(f"{where} is {show(name)}; give {scaled[1]}-<n> with n in 2..{MAX_NODES}")
        return _nodes(name, count, *_SCALED[scaled[1]])
    known = ", ".join((*_FIXED, *(f"{family}-<n>" for family in _SCALED)))
    raise ConfigValueError(
        f"{where} is {show(name)}, which is no preset; use one of {known} (n in 2..{MAX_NODES}), or the path of a JSON "
        "file, which ends with .json or has a separator"
    )
