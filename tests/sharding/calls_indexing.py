"""Calls of ops that take an index, and of those that make a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from commfuse_fx.sharding.rules.writing.common import on_first
from tests.sharding.calls import Case, aten, case, ints, mask, x


def indexing_cases() -> Iterator[Case]:
    dense = "S(0), S(0) -> S(0) | R, S(1) -> S(1) | S(1), R -> P | P, R -> P"
    yield case(aten.gather.default, x(8, 24), 1, ints(24, 8, 8), having=dense, without="S(1), S(1) -> S(1)")
    yield case(aten.gather.default, x(8, 24), 0, ints(8, 8, 4), having="R, S(0) -> S(0)", without="S(1), S(1) -> S(1)")
    yield case(aten.gather.default, x(8, 24, dtype=torch.float32), -1, ints(24, 8, 1), having="S(1), R -> P")
    yield case(
        aten.index_select.default, x(8, 24), 1, ints(24, 12), having="S(0), R -> S(0) | R, S(0) -> S(1) | P, R -> P"
    )
    scatter = "S(0), S(0), S(0) -> S(0)"
    yield case(
        aten.scatter.src,
        x(8, 24),
        1,
        ints(24, 8, 1),
        x(8, 1),
        having=scatter,
        without="S(1), S(1), S(1) -> S(1) | P, R, P -> P",
    )
    yield case(aten.scatter.value, x(8, 24), 1, ints(24, 8, 1), 1.0, having="S(0), S(0) -> S(0)", without="P, R -> P")
    yield case(aten.scatter.value, x(8, 24), 1, ints(24, 8, 1), 0.0, having="P, R -> P")
    yield case(
        aten.scatter_add.default,
        *(x(8, 24), 1, ints(24, 8, 12), x(8, 12)),
        having=f"{scatter} | P, R, P -> P | R, R, P -> P | P, S(1), S(1) -> P | R, S(1), S(1) -> P",
    )
    yield case(
        aten.scatter_add.default,
        *(x(8, 24), 1, ints(24, 8, 12), x(8, 12)),
        having="S(1), R, R -> S(1)",
    )
    yield case(aten.scatter_add.default, x(8, 24), 1, ints(24, 4, 8), x(8, 12), having="P, R, P -> P")
    yield case(aten.scatter_reduce.two, x(8, 24), 1, ints(24, 8, 4), x(8, 4), "amax", having="S(0), S(0), S(0) -> S(0)")
    rows = "S(1), R, S(1) -> S(1) | P, S(0), S(0) -> P | R, S(0), S(0) -> P | R, R, P -> P | P, R, P -> P"
    yield case(aten.index_add.default, x(24, 8), 0, ints(24, 12), x(12, 8), alpha=2, having=rows)
    yield case(aten.index_copy.default, x(24, 8), 0, torch.arange(12), x(12, 8), having="S(1), R, S(1) -> S(1)")
    yield case(aten.index_fill.int_Scalar, x(24, 8), 0, ints(24, 12), 1.0, having="S(1), R -> S(1)")
    for op in (aten.index, aten._unsafe_index):
        yield case(
            op.Tensor,
            *(x(24, 8), [ints(24, 8, 4, low=-24)]),
            having="S(1), R -> S(2) | R, S(0) -> S(0) | R, S(1) -> S(1) | S(0), R -> P | P, R -> P",
        )
    yield case(
        aten.index.Tensor, x(8, 24, 4), [None, ints(24, 8)], having="S(0), R -> S(0) | S(1), R -> P | R, S(0) -> S(1)"
    )
    yield case(
        aten.index.Tensor, x(6, 5, 8), [ints(6, 8, 1), ints(5, 4)], having="S(2), R, R -> S(2) | R, S(0), R -> S(0)"
    )
    yield case(
        aten.index.Tensor,
        x(6, 8, 5),
        [ints(6, 12), None, ints(5, 12)],
        having="S(1), R, R -> S(1) | R, S(0), S(0) -> S(0)",
    )
    yield case(aten.index.Tensor, x(8, 24), [mask(8)], having="P, R -> P", without="S(1), R -> S(1)")
    puts = "S(1), R, S(2) -> S(1) | P, R, P -> P | R, S(0), S(0) -> P | P, S(1), S(1) -> P | R, R, P -> P"
    for op in (aten.index_put, aten._unsafe_index_put):
        yield case(
            op.default, x(24, 8), [ints(24, 8, 4, low=-24)], x(8, 4, 8), True, having=f"{puts} | S(0), R, R -> S(0)"
        )
    yield case(
        aten.index_put.default,
        x(24, 8),
        [torch.arange(8)],
        x(8, 8),
        having="S(1), R, S(1) -> S(1)",
        without="R, S(0), S(0) -> P | P, R, P -> P",
    )
    yield case(
        aten.index_put.default, x(24, 8), [None, ints(8, 4)], x(), True, having="S(0), R, R -> S(0) | R, S(0), R -> P"
    )
    yield case(
        aten.index_put.default,
        x(6, 8, 5),
        [ints(6, 8), None, ints(5, 8)],
        x(8, 1),
        True,
        having="S(1), R, R, R -> S(1) | P, S(0), S(0), S(0) -> P",
    )


def factory_cases() -> Iterator[Case]:
    for op in (aten.zeros_like, aten.ones_like):
        yield case(op.default, x(8, 24), having="P -> R | S(1;3) -> S(1;3)", without="P -> P")
    yield case(aten.full_like.default, x(8, 24), 2, dtype=torch.int64, having="P -> R | S(0) -> S(0)")
    yield case(aten.new_zeros.default, x(8, 24), [8, 5], having="P -> R | S(0) -> R | S(1;3) -> R | R -> S(0)")
    yield case(aten.new_zeros.default, x(8, 24), [8, 24], having="S(0) -> S(0)")
    yield case(aten.new_full.default, x(8, 24), [24], 3, having="S(1) -> R | R -> S(0)")
    yield case(aten.new_ones.default, x(8), [], having="S(0) -> R")
    yield case(on_first, x(8, 24), 0, having="S(0) -> S(0) | P -> P")
