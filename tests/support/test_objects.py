"""Objects that ranks send to each other, and the bytes of tensors."""

from __future__ import annotations

import pytest
import torch

from commfuse_fx.support.objects import exchange_objects, memory_of


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6, dtype=torch.float64).view(2, 3),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
    ],
    ids=lambda values: f"{values.dtype}{list(values.shape)}",
)
def test_the_bytes_of_a_tensor_are_those_that_numpy_sees(values: torch.Tensor) -> None:
    assert bytes(memory_of(values)) == values.view(-1).view(torch.uint8).numpy().tobytes()


def test_objects_of_other_sizes_travel_whole() -> None:
    """Two ranks, of which the other one has the longer object."""
    sizes, rows = torch.tensor([0]), torch.tensor([], dtype=torch.uint8)
    other = {"text": "x" * 999, "number": 1.5}

    def gather(given: torch.Tensor) -> list[torch.Tensor]:
        nonlocal sizes, rows
        if given.dtype == torch.int64:
            sizes = given
            return [given, given + 999]
        rows = given
        return [given, given.clone()]

    mine, theirs = exchange_objects(other, gather)
    assert mine == theirs == other and mine is not other
    assert rows.numel() == int(sizes) + 999
