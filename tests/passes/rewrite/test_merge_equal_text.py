"""What `merge_equal` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.rewrite.merge_equal import MergeEqual
from tests.passes.cases import check


def test_equal_chains_and_views_merge() -> None:
    check(
        """
        in  %w: f32[4] = parameter
        in  %x: f32[4] = input
        fwd %/arange.0: i64[4] = aten.arange(4, device=cpu, pin_memory=False)
        fwd %/unsqueeze.0: i64[4,1] = aten.unsqueeze(%/arange.0, 1)
        fwd %/view.0: f32[4,1] = aten.view(%x, [4, 1])
        fwd %/mul.0: f32[4,1] = aten.mul.Tensor(%/view.0, %/unsqueeze.0)
        fwd %/arange.1: i64[4] = aten.arange(4, device=cpu, pin_memory=False)
        fwd %/unsqueeze.1: i64[4,1] = aten.unsqueeze(%/arange.1, 1)
        fwd %/view.1: f32[4,1] = aten.view(%x, [4, 1])
        fwd %/mul.1: f32[4,1] = aten.mul.Tensor(%/view.1, %/unsqueeze.1)
        fwd %/add.0: f32[4,1] = aten.add.Tensor(%/mul.0, %/mul.1)
        fwd %/mul.2: f32[4,4] = aten.mul.Tensor(%/add.0, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mul.2)
        return [%/sum.0]
        """,
        MergeEqual(at_most=0),
        """
        in  %w: f32[4] = parameter
        in  %x: f32[4] = input
        fwd %/arange.0: i64[4] = aten.arange(4, device=cpu, pin_memory=False)
        fwd %/unsqueeze.0: i64[4,1] = aten.unsqueeze(%/arange.0, 1)
        fwd %/view.0: f32[4,1] = aten.view(%x, [4, 1])
        fwd %/mul.0: f32[4,1] = aten.mul.Tensor(%/view.0, %/unsqueeze.0)
        fwd %/add.0: f32[4,1] = aten.add.Tensor(%/mul.0, %/mul.0)
        fwd %/mul.2: f32[4,4] = aten.mul.Tensor(%/add.0, %w)
        fwd %/sum.0: f32[] = aten.sum(%/mul.2)
        return [%/sum.0]
        """,
    )


FAR_APART = """
    in  %w: f32[8] = parameter
    fwd %/neg.0: f32[8] = aten.neg(%w)
    fwd %/sum.0: f32[] = aten.sum(%/neg.0)
    fwd %/exp.0: f32[8] = aten.exp(%w)
    fwd %/sum.1: f32[] = aten.sum(%/exp.0)
    fwd %/neg.1: f32[8] = aten.neg(%w)
    fwd %/dot.0: f32[] = aten.dot(%/neg.1, %w)
    fwd %/add.0: f32[] = aten.add.Tensor(%/sum.0, %/sum.1)
    fwd %/add.1: f32[] = aten.add.Tensor(%/add.0, %/dot.0)
    return [%/add.1]
"""


def test_a_value_is_kept_longer_for_its_equal_only_if_it_is_small() -> None:
    check(FAR_APART, MergeEqual(at_most=31), None)
    check(
        FAR_APART,
        MergeEqual(at_most=32),
        """
        in  %w: f32[8] = parameter
        fwd %/neg.0: f32[8] = aten.neg(%w)
        fwd %/sum.0: f32[] = aten.sum(%/neg.0)
        fwd %/exp.0: f32[8] = aten.exp(%w)
        fwd %/sum.1: f32[] = aten.sum(%/exp.0)
        fwd %/dot.0: f32[] = aten.dot(%/neg.0, %w)
        fwd %/add.0: f32[] = aten.add.Tensor(%/sum.0, %/sum.1)
        fwd %/add.1: f32[] = aten.add.Tensor(%/add.0, %/dot.0)
        return [%/add.1]
        """,
    )


def test_other_numbers_other_phases_draws_writes_and_what_is_handed_out_stay() -> None:
    check(
        """
        in  %w: f32[2] = parameter
        in  %v: f32[2] = parameter
        in  %b: f32[2] = buffer
        fwd %/mul.0: f32[2] = aten.mul.Tensor(%w, 0.0)
        fwd %/mul.1: f32[2] = aten.mul.Tensor(%w, -0.0)
        fwd %/mul.2: f32[2] = aten.mul.Tensor(%w, 0)
        fwd %/neg.0: f32[2] = aten.neg(%b)
        fwd %/rand.0: f32[2] = aten.rand([2], device=cpu, pin_memory=False)
        fwd %/rand.1: f32[2] = aten.rand([2], device=cpu, pin_memory=False)
        fwd %/ones.0: f32[2] = aten.ones([2], device=cpu, pin_memory=False)
        fwd %/ones.1: f32[2] = aten.ones([2], device=cpu, pin_memory=False)
        fwd %/add_.0: f32[2] = aten.add_.Tensor(%/ones.0, %/rand.0)
        fwd %/add.0: f32[2] = aten.add.Tensor(%/mul.0, %/mul.1)
        fwd %/add.1: f32[2] = aten.add.Tensor(%/add.0, %/mul.2)
        fwd %/add.2: f32[2] = aten.add.Tensor(%/add.1, %/neg.0)
        fwd %/add.3: f32[2] = aten.add.Tensor(%/add.2, %v)
        fwd %/add.4: f32[2] = aten.add.Tensor(%/add.3, %/ones.0)
        fwd %/add.5: f32[2] = aten.add.Tensor(%/add.4, %/ones.1)
        fwd %/sum.0: f32[] = aten.sum(%/add.5)
        bwd %/grad.mul.0: f32[2] = aten.mul.Tensor(%w, 0)
        bwd %/grad.exp.0: f32[2] = aten.exp(%/grad.mul.0)
        bwd %/grad.exp.1: f32[2] = aten.exp(%/grad.mul.0)
        upd %update/b: f32[2] = aten.copy_(%b, %/ones.1)
        return [%/sum.0, %/grad.exp.0, %/grad.exp.1]
        """,
        MergeEqual(),
        None,
    )
