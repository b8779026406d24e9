"""What `reinplace` makes of a few lines of text, and what it leaves."""

from commfuse_fx.passes.fuse.reinplace import Reinplace
from commfuse_fx.testing import assert_pass
from tests.passes.cases import check


def test_ops_overwrite_what_nobody_needs_any_more() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/mul.0: f32[4] = aten.mul.Tensor(%x, %x)
        fwd %/relu.0: f32[4] = aten.relu(%/mul.0)
        fwd %/view.0: f32[2,2] = aten.view(%/relu.0, [2, 2])
        fwd %/add.0: f32[2,2] = aten.add.Scalar(%/view.0, 1)
        fwd %/all_reduce: f32[2,2] = _c10d_functional.all_reduce(%/add.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x]}
        fwd %/wait: f32[2,2] = _c10d_functional.wait_tensor(%/all_reduce)
        fwd %/sum.0: f32[] = aten.sum(%/wait)
        return [%/sum.0]
        """,
        Reinplace(),
        """
        in  %x: f32[4] = input
        fwd %/mul.0: f32[4] = aten.mul.Tensor(%x, %x)
        fwd %/relu.0: f32[4] = aten.relu_(%/mul.0)
        fwd %/view.0: f32[2,2] = aten.view(%/relu.0, [2, 2])
        fwd %/add.0: f32[2,2] = aten.add_.Scalar(%/view.0, 1)
        fwd %/all_reduce: f32[2,2] = _c10d_functional.all_reduce_(%/add.0, sum, dp)  {group=dp(2) op=sum dtype=f32 bytes=16 members=[x]}
        fwd %/wait: f32[2,2] = _c10d_functional.wait_tensor(%/all_reduce)
        fwd %/sum.0: f32[] = aten.sum(%/wait)
        return [%/sum.0]
        """,
    )


def test_inputs_expanded_memory_and_what_somebody_still_reads_stay() -> None:
    check(
        """
        in  %x: f32[4] = input
        fwd %/neg.0: f32[4] = aten.neg(%x)
        fwd %/slice.0: f32[1] = aten.slice.Tensor(%/neg.0, 0, 0, 1)
        fwd %/relu.0: f32[4] = aten.relu(%/neg.0)
        fwd %/dot.0: f32[] = aten.dot(%/relu.0, %/relu.0)
        fwd %/expand.0: f32[4](0) = aten.expand(%/slice.0, [4])
        fwd %/tanh.0: f32[4] = aten.tanh(%/expand.0)
        fwd %/sum.0: f32[] = aten.sum(%/tanh.0)
        fwd %/max.0: f32[] = aten.maximum(%/sum.0, %/dot.0)
        return [%/max.0]
        """,
        Reinplace(),
        None,
    )


def test_what_the_caller_holds_or_may_need_again_is_not_overwritten() -> None:
    assert_pass(
        """
        in  %w: f32[2,2] = parameter
        fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %w)
        fwd %/exp.0: f32[2,2] = aten.exp(%/mul.0)
        fwd %/tanh.0: f32[2,2] = aten.tanh(%/exp.0)
        fwd %outputs: (f32[2,2]) = hand_over([%/tanh.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.neg.0: f32[2,2] = aten.neg(%output.grad)
        bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%/mul.0, %/grad.neg.0)
        bwd %/grad.mul.1: f32[2,2] = aten.mul.Tensor(%/grad.mul.0, %/tanh.0)
        return [%outputs, %/grad.mul.1]
        """,
        Reinplace(),
        """
        in  %w: f32[2,2] = parameter
        fwd %/mul.0: f32[2,2] = aten.mul.Tensor(%w, %w)
        fwd %/exp.0: f32[2,2] = aten.exp(%/mul.0)
        fwd %/tanh.0: f32[2,2] = aten.tanh_(%/exp.0)
        fwd %outputs: (f32[2,2]) = hand_over([%/tanh.0])
        bwd %output.grad: f32[2,2] = getitem(%outputs, 0)
        bwd %/grad.neg.0: f32[2,2] = aten.neg(%output.grad)
        bwd %/grad.mul.0: f32[2,2] = aten.mul.Tensor(%/mul.0, %/grad.neg.0)
        bwd %/grad.mul.1: f32[2,2] = aten.mul_.Tensor(%/grad.mul.0, %/tanh.0)
        return [%outputs, %/grad.mul.1]
        """,
    )
