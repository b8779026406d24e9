"""The error of a memory limit that nothing meets: what it advises."""

from __future__ import annotations

from commfuse_fx.cost.too_little_memory import _SHARING, TooLittleMemory

ERROR = TooLittleMemory(100, 500, (f'{_SHARING} ("level": 3)', "a smaller batch"))


def test_levels_that_take_less_are_advised() -> None:
    found = ERROR.on_levels({1: 600, 2: 400, 3: 300}, are_tried=False)
    assert found.helps == (
        f'{_SHARING} ("level": 3): the step needs 400 bytes on level 2, 300 bytes on level 3',
        "a smaller batch",
    )
    assert found.limit == 100 and found.needed == 500 and "; ".join(found.helps) in str(found)


def test_levels_that_take_no_less_are_not() -> None:
    assert ERROR.on_levels({2: 600, 3: 500}, are_tried=False).helps == ("a smaller batch",)
    assert ERROR.on_levels({}, are_tried=False) is ERROR


def test_what_a_search_has_tried_is_told() -> None:
    found = ERROR.on_levels({0: 900, 3: 500}, are_tried=True)
    assert found.helps == ("a smaller batch",)
    assert str(found).endswith(
        "tried the parallel optimizer: the step needs 900 bytes without it, 500 bytes on level 3"
    )
