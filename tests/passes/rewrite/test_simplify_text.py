"""What `simplify` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.simplify import Simplify
from tests.passes.cases import check


def test_detaches_transposes_that_cancel_and_what_nobody_reads_go() -> None:
    check(
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[2,4] = input
        fwd %/t.0: f32[4,4](1,4) = aten.t(%w)
        fwd %/t.1: f32[4,4] = aten.t(%/t.0)
        fwd %/detach.0: f32[4,4] = aten.detach(%/t.1)
        fwd %/mm.0: f32[2,4] = aten.mm(%x, %/detach.0)
        fwd %/view.0: f32[2,4] = aten.view(%/mm.0, [2, 4])
        fwd %/transpose.0: f32[4,2](1,4) = aten.transpose.int(%/view.0, 0, 1)
        fwd %/transpose.1: f32[2,4] = aten.transpose.int(%/transpose.0, 1, 0)
        fwd %/neg.0: f32[2,4] = aten.neg(%x)
        fwd %/sum.0: f32[] = aten.sum(%/transpose.1)
        return [%/sum.0]
        """,
        Simplify(),
        """
        in  %w: f32[4,4] = parameter
        in  %x: f32[2,4] = input
        fwd %/mm.0: f32[2,4] = aten.mm(%x, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mm.0)
        return [%/sum.0]
        """,
    )


def test_another_shape_another_order_and_what_writes_stay() -> None:
    check(
        """
        in  %w: f32[4] = parameter
        in  %count: i64[] = buffer
        in  %x: f32[2,2,2] = input
        fwd %/view.0: f32[8] = aten.view(%x, [8])
        fwd %/transpose.0: f32[2,2,2](2,4,1) = aten.transpose.int(%x, 0, 1)
        fwd %/transpose.1: f32[2,2,2](2,1,4) = aten.transpose.int(%/transpose.0, 1, 2)
        fwd %/add.0: i64[] = aten.add.Scalar(%count, 1)
        fwd %/dot.0: f32[] = aten.dot(%/view.0, %/view.0)
        fwd %/sum.0: f32[] = aten.sum(%/transpose.1)
        fwd %/add.1: f32[] = aten.add.Tensor(%/sum.0, %/dot.0)
        upd %update/count: i64[] = aten.copy_(%count, %/add.0)
        return [%/add.1]
        """,
        Simplify(),
        None,
    )
