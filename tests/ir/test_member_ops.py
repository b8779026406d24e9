"""Rows of several members in one message, and the pieces that it is cut into."""

from __future__ import annotations

import pytest
import torch

from commfuse_fx.ir.core.member_ops import Tables, cut
from commfuse_fx.ir.core.meta import Stretch

TABLES = Tables((2, 3, 1), ways=2)
MEMORY = torch.arange(12)  # [0 1 / 2 3], [4 5 6 / 7 8 9], [10 / 11]


@pytest.mark.parametrize(
    ("begin", "end", "rows"),
    [
        (0, 2, [[0, 1], [2, 3]]),
        (0, 6, [[0, 1, 4, 5, 6, 10], [2, 3, 7, 8, 9, 11]]),
        (1, 3, [[1, 4], [3, 7]]),
        (3, 4, [[5], [8]]),
        (2, 2, [[], []]),
    ],
)
def test_a_stretch_is_taken_from_the_table_of_each_member_and_put_back(
    begin: int, end: int, rows: list[list[int]]
) -> None:
    stretch, memory = Stretch(begin, end), torch.zeros(12, dtype=torch.int64)
    message = TABLES.message(MEMORY, stretch)
    assert message.tolist() == rows
    TABLES.put(memory, stretch, message)
    assert sorted(memory[memory != 0].tolist()) == sorted(each for row in rows for each in row if each)
    assert (memory[memory != 0] == MEMORY[memory != 0]).all()


def test_all_of_one_member_is_sent_from_where_it_lies() -> None:
    assert [TABLES.is_table(Stretch(*each)) for each in ((2, 5), (0, 5), (2, 4), (3, 5), (5, 6))] == [
        True, False, False, False, True
    ]  # fmt: skip
    assert TABLES.message(MEMORY, Stretch(2, 5)).data_ptr() == MEMORY[4:].data_ptr()


@pytest.mark.parametrize(
    ("sizes", "stretch", "size", "pieces"),
    [
        ((4, 4, 4, 4), (0, 16), 4, [4, 8, 12, 16]),
        ((3, 3, 3), (0, 9), 4, [3, 6, 9]),
        ((100,), (0, 100), 24, [25, 50, 75, 100]),
        ((1, 30, 2, 2), (0, 35), 8, [7, 15, 23, 31, 35]),
        ((7,), (0, 7), 4, [7]),
        ((5, 50, 5), (5, 60), 20, [30, 55, 60]),
    ],
)
def test_pieces_are_whole_members_or_equal_parts_of_one(
    sizes: tuple[int, ...], stretch: tuple[int, int], size: int, pieces: list[int]
) -> None:
    found = cut(sizes, Stretch(*stretch), size)
    assert [each.end for each in found] == pieces
    assert [each.begin for each in found] == [stretch[0], *pieces[:-1]]
