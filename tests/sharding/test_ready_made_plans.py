"""parallel_mode="auto" is never predicted to be slower than the ready-made plans: transformers on clusters of H100s."""

from __future__ import annotations

import pytest

from benchmarks.hand_made import measure


@pytest.mark.parametrize(("model", "devices", "rows"), [("gpt2", 8, 8)])
def test_no_slower_than_a_plan_made_by_hand(model: str, devices: int, rows: int) -> None:
    searched, *others = measure(model, 1, devices, rows, length=512, tensor=(8,))
    assert len(others) == 4
    assert searched["milliseconds"] <= min(each["milliseconds"] for each in others)
