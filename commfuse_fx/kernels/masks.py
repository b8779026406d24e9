"""Masks of dropout on CPUs, from 16 random bits per number.

torch's own kernel takes 64 bits per number from its generator, one number after the other, except on processors for
which it has a vectorised one. Dropout is 5 to 10% of a small transformer's step with it.

Why: docs/decisions.md, "Dropout has a stream per rank".
Why: docs/decisions.md, "Kernels are chosen on the rank, not in the graph".
Why: docs/decisions.md, "Regions draw masks by an op of this package".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch

_DRAWS = (torch.Tag.nondeterministic_seeded,)

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define("bernoulli(Tensor self, float p) -> Tensor", tags=_DRAWS)
_library.define("bernoulli_(Tensor(a!) self, float p) -> Tensor(a!)", tags=_DRAWS)
_library.define(
    "mask(int[] size, int[] stride, float p, bool quick, *, ScalarType dtype, Device device) -> Tensor", tags=_DRAWS
)

_VALUES = 1 << 16  # that a number's random bits can have: those of an int16, from -_HALF on
_HALF = _VALUES >> 1
_NEVER = 2.0**-53  # less than what torch's own kernel, which compares with a random double, can tell from 0


def _bernoulli_(self: torch.Tensor, p: float) -> torch.Tensor:
    """Fill `self`, of any type and shape, with 1 at probability `p`, otherwise with 0. Returns it."""
    in_memory = self.permute(sorted(range(self.ndim), key=self.stride, reverse=True))
    if not in_memory.is_contiguous() or not _draws_one_by_one():
        return self.bernoulli_(p)
    count = self.numel()
    often = p > 0.5
    rare = 1 - p if often else p
    below = int(rare * _VALUES)  # a threshold of 16 bits: it says a little less than what is asked for
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)[:count]
    compare = torch.ge if often else torch.lt
    compare(bits.view(in_memory.shape), below - _HALF, out=in_memory)
    said = below / _VALUES
    _sprinkle(in_memory.view(-1), (rare - said) / (1 - said), 0 if often else 1)
    return self


def _sprinkle(numbers: torch.Tensor, p: float, value: int) -> None:
    """Set each number to `value` at a small probability `p`, independently: by the distances between those."""
    count, last = numbers.numel(), -1.0
    places: list[int] = []
    while last < count and p > _NEVER:
        distances = torch.empty(int(count * p) + 4, dtype=torch.float64).geometric_(p)
        _, *reached = accumulate(distances.tolist(), initial=last)
        last = reached[-1]
        places += [int(place) for place in reached if place < count]
    if places:
        numbers[torch.tensor(places)] = value


def _bernoulli(self: torch.Tensor, p: float) -> torch.Tensor:
    return _bernoulli_(torch.empty_like(self), p)


def _mask(
    size: Sequence[int], stride: Sequence[int], p: float, quick: bool, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    drawn = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return _bernoulli_(drawn, p) if quick else drawn.bernoulli_(p)


def _fake_mask(
    size: Sequence[int], stride: Sequence[int], p: float, quick: bool, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@cache
def _draws_one_by_one() -> bool:
    """Whether torch's kernel draws a double per number here. Its vectorised one, elsewhere, draws other numbers."""
    generator = torch.Generator()
    drawn = torch.empty(64).bernoulli_(0.5, generator=generator.manual_seed(0))
    uniform = torch.rand(64, dtype=torch.float64, generator=generator.manual_seed(0))
    return torch.equal(drawn.bool(), uniform < 0.5)


torch.library.impl("commfuse::bernoulli", "CPU", lib=_library)(_bernoulli)
torch.library.impl("commfuse::bernoulli_", "CPU", lib=_library)(_bernoulli_)
torch.library.register_fake("commfuse::bernoulli", lambda self, p: torch.empty_like(self), lib=_library)
torch.library.register_fake("commfuse::bernoulli_", lambda self, p: self, lib=_library)

torch.library.impl("commfuse::mask", "CompositeExplicitAutograd", lib=_library)(_mask)
torch.library.register_fake("commfuse::mask", _fake_mask, lib=_library)

bernoulli = torch.ops.commfuse.bernoulli.default
"""(Tensor, p) -> Tensor of its shape, type and strides; each number is 1 with probability p, independently, else 0."""

bernoulli_ = torch.ops.commfuse.bernoulli_.default
"""The same into the given tensor, which it returns."""

mask = torch.ops.commfuse.mask.default
"""(size, stride, p, quick, *, dtype, device) -> Tensor that `bernoulli` fills if `quick`, else PyTorch's own kernel.

For compilers: it reads no tensor and writes to none.
"""
