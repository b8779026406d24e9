"""Calls of products of matrices, and of ops that reduce."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.calls import Case, aten, case, ints, mask, with_nan, x, z


def matmul_cases() -> Iterator[Case]:
    mm = "S(0), R -> S(0) | R, S(1;3) -> S(1;3) | S(1), S(0) -> P | S(1;3), S(0;3) -> P | P, R -> P | R, P -> P"
    yield case(aten.mm.default, x(8, 24), x(24, 24), having=mm, without="P, P -> P")
    yield case(aten.mm.default, x(24, 8).t(), x(24, 24).t(), having=mm)
    yield case(aten.mm.default, ints(5, 8, 24), ints(5, 24, 8), having="S(0), R -> S(0)", without="S(1), S(0) -> P")
    addmm = "S(0), R, S(1) -> S(1) | R, S(0), R -> S(0) | R, S(1), S(0) -> P | P, S(1), S(0) -> P | R, P, R -> P"
    yield case(aten.addmm.default, x(24), x(8, 24), x(24, 24), having=addmm)
    yield case(aten.addmm.default, x(24), x(8, 24), x(24, 24), beta=2, alpha=3, having=addmm)
    yield case(aten.addmm.default, x(8, 24), x(8, 24), x(24, 24), having="S(0), S(0), R -> S(0) | P, R, P -> P")
    yield case(aten.addmm.default, x(8, 1), x(8, 24), x(24, 24), having="S(0), S(0), R -> S(0) | R, R, S(1) -> S(1)")
    yield case(
        aten.bmm.default, x(8, 4, 24), x(8, 24, 12), having="S(0), S(0) -> S(0) | S(1), R -> S(1) | S(2), S(1) -> P"
    )
    yield case(
        aten.baddbmm.default, x(1, 12), x(8, 4, 24), x(8, 24, 12), having="R, S(0), S(0) -> S(0) | R, S(2), S(1) -> P"
    )
    yield case(aten.mv.default, x(8, 24), x(24), having="S(0), R -> S(0) | S(1), S(0) -> P | P, R -> P")
    yield case(aten.addmv.default, x(8), x(8, 24), x(24), beta=2, having="S(0), S(0), R -> S(0) | R, S(1), S(0) -> P")
    yield case(aten.dot.default, x(24), x(24), having="S(0;3), S(0;3) -> P | P, R -> P | R, P -> P")
    yield case(aten.vdot.default, z(24), z(24), having="S(0), S(0) -> P | P, R -> P | R, P -> P")
    yield case(
        aten.matmul.default, x(8, 1, 4, 24), x(4, 24, 12), having="S(0), R -> S(0) | R, S(0) -> S(1) | S(3), S(1) -> P"
    )
    yield case(aten.matmul.default, x(24), x(8, 24, 12), having="R, S(0) -> S(0) | R, S(2) -> S(1) | S(0), S(1) -> P")
    yield case(aten.matmul.default, x(8, 4, 24), x(24), having="S(1), R -> S(1) | S(2), S(0) -> P")
    yield case(aten.matmul.default, x(24), x(24), having="S(0), S(0) -> P")
    yield case(
        aten.linear.default, x(8, 4, 24), x(12, 24), having="S(1), R -> S(1) | R, S(0) -> S(2) | S(2), S(1) -> P"
    )
    yield case(aten.linear.default, x(8, 24), x(12, 24), x(12), having="R, S(0), S(0) -> S(1) | S(1), S(1), R -> P")


def reduction_cases() -> Iterator[Case]:
    yield case(aten.sum.default, x(8, 24), having="S(0) -> P | S(1;3) -> P | P -> P")
    yield case(aten.sum.default, mask(8, 24), having="S(0) -> R", without="P -> P | S(0) -> P")
    yield case(aten.sum.default, x(), having="P -> P")
    yield case(aten.sum.dim_IntList, x(8, 4, 24), [0, -1], having="S(0) -> P | S(1) -> S(0) | S(2) -> P | P -> P")
    yield case(aten.sum.dim_IntList, x(8, 4, 24), [1], True, having="S(0) -> S(0) | S(1) -> P | S(2;3) -> S(2;3)")
    yield case(aten.sum.dim_IntList, x(8, 24), [], having="S(0) -> P")
    yield case(aten.sum.dim_IntList, x(8, 24), None, True, having="S(0) -> P")
    yield case(aten.sum.dim_IntList, ints(9, 8, 24), [0], dtype=torch.float64, having="S(0) -> P", without="P -> P")
    yield case(aten.mean.default, x(8, 24), having="S(0) -> P | S(1) -> P | P -> P")
    yield case(aten.mean.dim, x(8, 4, 24), [-1, 0], having="S(0) -> P | S(1) -> S(0) | S(2) -> P | P -> P")
    yield case(aten.mean.dim, x(8, 24), [-1], True, having="S(0) -> S(0) | S(1;3) -> P")
    yield case(aten.count_nonzero.dim_IntList, mask(8, 24), [1], having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.amax.default, x(8, 24), [-1], True, having="S(0) -> S(0) | S(1) -> R", without="P -> P")
    yield case(aten.amax.default, ints(99, 8, 24), having="S(0) -> R | S(1) -> R")
    yield case(aten.amin.default, x(8, 24), [0], having="S(0) -> R | S(1) -> S(0)")
    yield case(aten.amin.default, ints(99, 8, 24), [0], having="S(1) -> S(0)", without="S(0) -> R")
    yield case(aten.max.default, x(8, 24), having="S(0) -> R")
    for extreme in (aten.amax.default, aten.amin.default):
        yield case(extreme, with_nan(8, 24), [0], having="S(0) -> R")
    yield case(aten.linalg_vector_norm.default, with_nan(8, 24), float("inf"), having="S(0) -> R")
    yield case(aten.min.default, x(8, 24), having="S(1) -> R")
    yield case(aten.max.dim, x(8, 24), 1, having="S(0) -> S(0), S(0)", without="S(1) -> R, R")
    yield case(aten.min.dim, x(8, 24), 0, True, having="S(1) -> S(1), S(1)")
    yield case(aten.argmax.default, x(8, 24), -1, having="S(0) -> S(0)", without="S(1) -> R")
    yield case(aten.argmin.default, x(8, 4, 24), 0, True, having="S(1) -> S(1) | S(2) -> S(2)")
    yield case(aten.any.default, mask(8, 24), having="S(0) -> R | S(1) -> R")
    yield case(aten.any.dim, ints(40, 8, 24) == 7, 1, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.all.dim, ints(40, 8, 24) != 7, 1, True, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.all.dims, ints(40, 8, 4, 24) != 7, [0, 1], having="S(0) -> R | S(2) -> S(0)")
    yield case(aten.all.default, torch.ones(8, dtype=torch.uint8), having="R -> R")
    yield case(aten.prod.dim_int, x(8, 24), 1, having="S(0) -> S(0)", without="S(1) -> P")
    yield case(aten.var.correction, x(8, 4, 24), [1, 2], correction=0, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.std.dim, x(8, 24), [0], True, True, having="S(1) -> S(1)")
    yield case(aten.var_mean.correction, x(8, 24), [1], correction=1, keepdim=True, having="S(0) -> S(0), S(0)")
    yield case(aten.logsumexp.default, x(8, 24), [1], having="S(0) -> S(0)", without="P -> P")
    yield case(aten.median.dim, x(8, 24), 1, having="S(0) -> S(0), S(0)")
    yield case(aten.linalg_vector_norm.default, x(8, 24), having="S(0) -> R | S(1;3) -> R", without="P -> P")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 2, [1], True, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 1, having="S(0) -> P")
    yield case(aten.linalg_vector_norm.default, x(8, 24), float("inf"), having="S(0) -> R")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 3, [0], having="S(1) -> S(0)", without="S(0) -> R")
    yield case(aten.norm.Scalar, x(8, 24), having="S(0) -> R")
    yield case(aten.norm.ScalarOpt_dim, x(8, 24), None, [1], having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.histc.default, x(8, 24), 4, -1, 1, having="S(0) -> P | S(1) -> P", without="P -> P")
    yield case(aten.histc.default, x(8, 24), 4, having="R -> R", without="S(0) -> P")
    yield case(aten.cumsum.default, x(8, 24), -1, having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.cumprod.default, x(8, 24), 0, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.logcumsumexp.default, x(8, 24), 0, having="S(1) -> S(1)")
    yield case(aten.sort.default, x(8, 24), -1, True, having="S(0) -> S(0), S(0)", without="S(1) -> S(1), S(1)")
    yield case(aten.sort.stable, ints(4, 8, 24), stable=True, dim=0, having="S(1) -> S(1), S(1)")
    yield case(aten.argsort.default, x(8, 24), having="S(0) -> S(0)")
    yield case(aten.topk.default, x(8, 24), 2, having="S(0) -> S(0), S(0)")
