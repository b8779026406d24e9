"""How fast one rank computes: the figures of a Device, measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.ir.core.meta import dtype_name


def probe(device: torch.device, seconds: float) -> dict[str, Any]:
    """The fields of Device, as this rank measures them while all others do the same."""
    is_cuda = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if is_cuda else []), torch.float64]
    share = seconds / (len(dtypes) + 2)
    flops = {dtype_name(dtype): _flops(dtype, device, share) for dtype in dtypes}
    return {
        "name": device_name(device),
        "flops": {name: value for name, value in flops.items() if value is not None},
        "memory_bandwidth": _memory_bandwidth(device, share),
        "memory_bytes": _memory_bytes(device),
        "op_overhead": _op_overhead(device, share),
    }


def slowest_figures(everybody: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A step waits for its slowest rank: the worst of the ranks' figures, and the dtypes that all of them can do."""
    common = [name for name in everybody[0]["flops"] if all(name in each["flops"] for each in everybody)]
    return {
        "name": everybody[0]["name"],
        "flops": {name: min(each["flops"][name] for each in everybody) for name in common},
        "memory_bandwidth": min(each["memory_bandwidth"] for each in everybody),
        "memory_bytes": min(each["memory_bytes"] for each in everybody),
        "op_overhead": max(each["op_overhead"] for each in everybody),
    }


def _flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float | None:
    """FLOP per second of matrix products as a step has them; None where the device has none of this dtype."""
    shapes = [(64, 512, 2048), (512, 512, 512)] if device.type == "cpu" else [(2048, 4096, 4096), (4096, 4096, 4096)]
    work, spent = 0, 0.0
    for m, k, n in shapes:
        try:
            a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
            spent += _median_seconds(lambda a=a, b=b: torch.mm(a, b), device, seconds / len(shapes))  # type: ignore[misc]
        except RuntimeError:  # no kernel for this dtype here
            return None
        work += 2 * m * k * n
    return work / spent


def _memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes per second read and written by an addition and a copy that no cache holds."""
    count = (64 if device.type == "cpu" else 256) * 2**20 // 4
    x, y, out = (torch.zeros(count, device=device) for _ in range(3))
    add = _median_seconds(lambda: torch.add(x, y, out=out), device, seconds / 2)
    copy = _median_seconds(lambda: out.copy_(x), device, seconds / 2)
    return 5 * count * 4 / (add + copy)


def _op_overhead(device: torch.device, seconds: float) -> float:
    """Seconds of an op that computes next to nothing, many of them in a row."""
    x, count = torch.zeros(1, device=device), 500
    add = torch.ops.aten.add.Tensor._op

    def adds() -> None:
        for _ in range(count):
            add(x, x)

    return _median_seconds(adds, device, seconds) / count


def _median_seconds(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    call()
    synchronize(device)
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 3 or (perf_counter() - begin < seconds and len(times) < 1000):
        start = perf_counter()
        call()
        synchronize(device)
        times.append(perf_counter() - start)
    return median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the CPU as Linux calls it, with the threads that an op uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _memory_bytes(device: torch.device) -> int:
    """Capacity: the GPU's, or this rank's part of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here
