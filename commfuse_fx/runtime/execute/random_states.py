"""The random generators that a program draws from: their states, and the streams of single ranks.

Why: docs/decisions.md, "Dropout has a stream per rank".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.program import Program


class RandomStates:
    """The states of some generators at the time when this is made. They are on the host: no device waits for them."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Let all of the generators go on from there again."""
        for generator, state in self._states:
            generator.set_state(state)


def generators_of(program: Program) -> list[torch.Generator]:
    """The generators that running a program may draw from: torch's own for the CPU and for each device that holds a
    value of the program, and those that are arguments of its nodes."""
    found: list[Any] = [torch.default_generator]
    devices: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        devices.update(dict.fromkeys(_devices(info(node).spec)))
        if isinstance(own := node.kwargs.get("generator"), torch.Generator):
            found.append(own)
    for device in devices:
        found += default_generators(torch.device(device))
    return list({generator._cdata: generator for generator in found}.values())


def _devices(spec: Spec) -> Iterator[str]:
    if isinstance(spec, TensorSpec):
        yield spec.device
    elif isinstance(spec, tuple):
        for part in spec:
            yield from _devices(part)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Torch's generator for a device; none for devices that do not draw, such as meta."""
    if device.type == "cpu":
        return [torch.default_generator]
    if device.type == "meta":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    return list(generators[index : index + 1])


@contextmanager
def stream_of_rank(seed: Callable[[], int], rank: int, devices: Sequence[int]) -> Iterator[None]:
    """Inside of the block torch's generators, of the CPU and of these CUDA devices, draw from a stream of this rank.

    seed: gives a number that all ranks share. It may draw from the CPU's generator, which moves that one on, so the
        next step gets another seed. After an error the number has not been drawn.
    """
    before = torch.get_rng_state()
    own = seed_of_rank(seed(), rank)
    state = torch.get_rng_state()
    cuda = [torch.cuda.get_rng_state(device) for device in devices]
    try:
        torch.default_generator.manual_seed(own)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(own)
        yield
    except BaseException:
        state = before  # the step has not happened
        raise
    finally:
        torch.set_rng_state(state)
        for device, saved in zip(devices, cuda, strict=True):
            torch.cuda.set_rng_state(saved, device)


def seed_of_rank(seed: int, rank: int) -> int:
    """The seed of a rank's own random stream, from a seed that all ranks share."""
    return (seed + rank * _GOLDEN) % (1 << 63)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, which keeps the seeds of neighbouring ranks far apart
