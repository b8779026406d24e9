"""What drawing random numbers costs on a CPU, in passes over memory.

Elsewhere ops are as fast as they read and write memory. A CPU draws from its generator one number after another, which
takes many times as long, and numbers by position are mixed by many ops on what its cache holds.

Source: measured with PyTorch 2.13 on one core that reads and writes 44 GB/s, for 2^14 to 2^20 numbers in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CACHED = 0.45
"""What a pass over memory that a CPU's cache holds counts, as a part of one over memory."""

_BY_PASSES = {
    46: ("aten.bernoulli", "aten.bernoulli_"),
    9: ("commfuse.bernoulli", "commfuse.bernoulli_"),
    53: ("aten.native_dropout",),
    21: ("aten.rand", "aten.rand_like", "aten.uniform", "aten.uniform_"),
    20: ("aten.randint", "aten.randint_like", "aten.random", "aten.random_"),
    26: ("aten.randn", "aten.randn_like", "aten.normal", "aten.normal_"),
    157: ("aten.exponential", "aten.exponential_"),
    40: ("aten.randperm",),
}

DRAWN_ON_CPU: Mapping[str, int] = MappingProxyType({op: passes for passes, ops in _BY_PASSES.items() for op in ops})
"""Op, without its overload -> passes over 4 bytes for each number that it draws."""
