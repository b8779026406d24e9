"""Values that differ in anything have other checksums, however they lie in memory."""

from __future__ import annotations

import torch

from commfuse_fx.runtime.memory.value_checksum import value_checksum


def of(*tensors: torch.Tensor) -> int:
    return value_checksum(tensors)


def test_one_bit_and_one_place() -> None:
    values = torch.randn(3, 1 << 17, generator=torch.Generator().manual_seed(0))  # more than one chunk
    last = values.clone()
    last.view(torch.int32)[-1, -1] ^= 1
    swapped = values[[0, 2, 1]]
    found = [of(values), of(last), of(swapped), of(values[:2]), of(*values), of(values, values)]
    assert len(dict.fromkeys(found)) == len(found)
    assert all(0 < each < 1 << 62 for each in found)
    assert of(values.t().contiguous().t()) == of(values) == of(values.clone())


def test_all_types() -> None:
    """Each element counts, also of those that fill no whole word of 8 bytes, or begin in the middle of one."""
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.int16,
        torch.bool,
        torch.float32,
    ):
        ones = torch.ones(11, dtype=dtype)
        found = [of(ones)]
        for place in range(11):
            others = ones.clone()
            others[place] = 0
            found.append(of(others))
        assert len(dict.fromkeys(found)) == 12, dtype
        for begin in range(9):
            assert of(torch.ones(20, dtype=dtype)[begin : begin + 11]) == found[0], (dtype, begin)
    assert of(torch.tensor(0.0)) != of(torch.tensor(-0.0))
    assert of(torch.zeros(0)) and of()
    assert of(torch.ones(2, dtype=torch.complex64).conj()) == of(
        torch.ones(2, dtype=torch.complex64).conj().resolve_conj()
    )
