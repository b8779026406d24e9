"""Calls of ops that view, cut and join tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.calls import Case, aten, case, ints, x


def view_cases() -> Iterator[Case]:
    for op in (aten.view, aten._unsafe_view, aten.reshape, aten.view_copy):
        yield case(op.default, x(8, 24), [8, 3, 8], having="S(0) -> S(0) | S(1;3) -> S(2) | P -> P")
    yield case(aten.view.default, x(8, 24), [-1], having="S(0) -> S(0) | S(1) -> S(0;8) | S(0;2) -> S(0;2)")
    yield case(aten.view.default, x(8, 4, 6), [32, -1], having="S(0) -> S(0) | S(1) -> S(0;8)")
    yield case(aten.view.default, x(32, 6), [8, 4, 6], having="S(0) -> S(0) | S(0;8) -> S(1)")
    yield case(aten.view.default, x(1, 8, 24), [8, 1, 24, 1], having="S(1) -> S(0) | S(2;3) -> S(2;3)")
    yield case(aten.view.default, x(8, 24), [2, 4, 4, 6], having="S(0;2) -> S(1) | S(1) -> S(2)")
    yield case(aten.view.default, x(8, 24), [24, 8], having="S(0) -> S(0)")
    yield case(aten.view.default, x(24, 8).t().contiguous(), [192], having="S(0) -> S(0)")
    yield case(aten.view.default, x(8), [8], having="S(0) -> S(0)")
    yield case(aten.view.default, x(1), [], having="P -> P")
    yield case(aten.view.default, x(0, 8), [8, 0], having="P -> P")
    yield case(aten._reshape_alias.default, x(8, 24), [8, 3, 8], [24, 8, 1], having="S(1;3) -> S(2)")
    yield case(aten.view.dtype, x(8, 24, dtype=torch.float32), torch.int32, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.view.dtype, x(8, 24), torch.float32, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.view_as_complex.default, x(8, 24, 2), having="S(1) -> S(1) | P -> P")
    yield case(aten.expand.default, x(8, 1, 24), [8, 8, -1], having="S(0) -> S(0) | R -> S(1) | S(2;3) -> S(2;3)")
    yield case(aten.expand.default, x(24), [8, 24], having="R -> S(0) | S(0) -> S(1) | P -> P")
    yield case(aten.expand.default, x(), [8], having="R -> S(0) | P -> P")
    yield case(aten.t.default, x(8, 24), having="S(0) -> S(1) | S(1;3) -> S(0;3) | P -> P")
    yield case(aten.t.default, x(8), having="S(0) -> S(0)")
    yield case(aten.transpose.int, x(8, 24, 4), 0, -1, having="S(0) -> S(2) | S(2) -> S(0) | S(1) -> S(1) | P -> P")
    yield case(aten.permute.default, x(8, 24, 4), [2, 0, -2], having="S(0) -> S(1) | S(1) -> S(2) | S(2) -> S(0)")
    yield case(aten.movedim.int, x(8, 24, 4), 0, 2, having="S(0) -> S(2) | S(1) -> S(0) | S(2) -> S(1)")
    yield case(aten.movedim.intlist, x(8, 24, 4), [0, 1], [-1, 0], having="S(0) -> S(2) | S(1) -> S(0)")
    yield case(aten.squeeze.default, x(4, 1, 24, 1), having="S(0) -> S(0) | S(2) -> S(1) | P -> P")
    yield case(aten.squeeze.dim, x(4, 1, 24), 1, having="S(0) -> S(0) | S(2) -> S(1)")
    yield case(aten.squeeze.dim, x(4, 1, 24), 0, having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.squeeze.dims, x(4, 1, 24, 1), [-1, 0], having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.unsqueeze.default, x(8, 24), -1, having="S(1) -> S(1) | P -> P")
    yield case(aten.unsqueeze.default, x(8, 24), 0, having="S(0) -> S(1) | S(1;3) -> S(2;3)")
    yield case(aten.unfold.default, x(8, 4, 24), 1, 2, 1, having="S(0) -> S(0) | S(2) -> S(2) | P -> P")
    yield case(aten.unfold_backward.default, x(8, 3, 24, 2), [8, 4, 24], 1, 2, 1, having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.diagonal.default, x(5, 8, 6, 24), 1, 0, 2, having="S(1) -> S(0) | S(3) -> S(1) | P -> P")
    yield case(aten.diagonal_backward.default, x(8, 5), [5, 8, 6], 1, 0, 2, having="S(0) -> S(1) | P -> P")


def slicing_cases() -> Iterator[Case]:
    end = 2**63 - 1
    yield case(
        aten.select.int, x(8, 5, 24), 1, -1, having="S(0) -> S(0) | S(2) -> S(1) | P -> P", without="S(1) -> S(1)"
    )
    yield case(aten.select_backward.default, x(8, 24), [8, 5, 24], 1, 2, having="S(0) -> S(0) | S(1) -> S(2) | P -> P")
    yield case(aten.select_scatter.default, x(8, 5, 24), x(8, 24), 1, 2, having="S(2), S(1) -> S(2) | P, P -> P")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, end, having="S(1) -> S(1) | S(1;3) -> S(1;3) | S(0) -> S(0) | P -> P")
    yield case(
        aten.slice.Tensor, x(8, 24), 1, 8, 16, having="S(1;3) -> S(1) | S(1;6) -> S(1;2)", without="S(1) -> S(1)"
    )
    yield case(aten.slice.Tensor, x(8, 24), -1, -8, end, having="S(1;3) -> S(1) | S(0) -> S(0)")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, -1, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, end, 2, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), 0, 3, 3, having="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), having="S(0) -> S(0)")
    yield case(aten.narrow.default, x(8, 24), 1, 16, 8, having="S(1;3) -> S(1) | S(0) -> S(0) | P -> P")
    yield case(
        aten.slice_backward.default, x(8, 8), [8, 24], 1, 8, 16, 1, having="S(1) -> S(1;3) | S(0) -> S(0) | P -> P"
    )
    yield case(aten.slice_backward.default, x(8, 24), [8, 24], 1, 0, end, 1, having="S(1) -> S(1) | S(0) -> S(0)")
    yield case(aten.slice_backward.default, x(8, 12), [8, 24], 1, 0, end, 2, having="S(0) -> S(0)")
    yield case(aten.slice_scatter.default, x(8, 24), x(8, 8), 1, 8, 16, having="S(1;3), S(1) -> S(1;3) | P, P -> P")
    yield case(
        aten.split.Tensor, x(8, 24), 8, 1, having="S(1;3) -> S(1), S(1), S(1) | S(0;2) -> S(0;2), S(0;2), S(0;2)"
    )
    yield case(aten.split.Tensor, x(8, 24), 16, 1, having="S(1;3) -> S(1;2), S(1) | P -> P, P")
    yield case(aten.split_with_sizes.default, x(8, 32), [16, 8, 8], 1, having="S(1;4) -> S(1;2), S(1), S(1)")
    yield case(aten.split_with_sizes.default, x(8, 24), [5, 19], -1, having="S(0) -> S(0), S(0)")
    yield case(aten.split_with_sizes.default, x(8, 24), [4, 4], having="S(0;2) -> S(0), S(0) | S(1) -> S(1), S(1)")
    yield case(aten.split_with_sizes_copy.default, x(8, 24), [4, 4], having="S(0;2) -> S(0), S(0)")
    yield case(aten.chunk.default, x(8, 24), 3, 1, having="S(1;3) -> S(1), S(1), S(1) | P -> P, P, P")
    yield case(aten.unbind.int, x(3, 8, 24), having="S(1) -> S(0), S(0), S(0) | P -> P, P, P")


def joining_cases() -> Iterator[Case]:
    yield case(aten.cat.default, [x(8, 8)] * 3, 1, having="S(1), S(1), S(1) -> S(1;3) | P, P, P -> P")
    yield case(aten.cat.default, [x(8, 16), x(8, 8)], -1, having="S(1;2), S(1) -> S(1;3) | S(0), S(0) -> S(0)")
    yield case(aten.cat.default, [x(0), x(8, 8), x(8, 8)], having="R, S(1), S(1) -> S(1) | R, S(0), S(0) -> S(0;2)")
    yield case(aten.cat.default, [ints(4, 8, 5), ints(4, 8, 6)], 1, having="S(0), S(0) -> S(0)", without="P, P -> P")
    yield case(
        aten.stack.default, [x(8, 24), x(8, 24)], 1, having="S(0), S(0) -> S(0) | S(1), S(1) -> S(2) | P, P -> P"
    )
    yield case(aten.flip.default, x(8, 24), [-1], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.roll.default, x(8, 24), [1], [1], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.roll.default, x(8, 24), [1], having="P -> P", without="S(0) -> S(0)")
    yield case(aten.repeat.default, x(8, 24), [1, 3], having="S(0) -> S(0) | S(1) -> S(1;3) | P -> P")
    yield case(aten.repeat.default, x(24), [8, 2], having="R -> S(0) | S(0) -> S(1;2) | R -> S(0;2)")
    yield case(aten.repeat_interleave.self_int, x(8, 24), 3, 1, having="S(1) -> S(1) | S(0) -> S(0) | P -> P")
    yield case(aten.repeat_interleave.self_int, x(24), 3, output_size=72, having="S(0) -> S(0)")
    yield case(aten.constant_pad_nd.default, x(8, 24), [1, 2], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.constant_pad_nd.default, x(8, 24), [0, 0, 2, 2], 1.0, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.tril.default, x(8, 6, 6), having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.triu.default, x(8, 6, 6), 1, having="S(0;2) -> S(0;2) | P -> P", without="S(2) -> S(2)")
