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


SPLIT = """
    in  %x: f32[6] = input
    fwd %/exp.0: f32[6] = aten.exp(%x)
    fwd %/split.0: (f32[2], f32[4]) = aten.split_with_sizes(%/exp.0, [2, 4], 0)
    fwd %/part.0: f32[2] = getitem(%/split.0, 0)
    fwd %/part.1: f32[4] = getitem(%/split.0, 1)
    fwd %/view.0: f32[2,2] = aten.view(%/part.1, [2, 2])
"""


def test_a_part_is_overwritten_while_others_are_needed() -> None:
    """The bucket that is split lies itself in memory that an op has handed on."""
    rest = """
        fwd %/sum.0: f32[] = aten.sum({one})
        fwd %/neg.0: f32[2,2] = aten.{neg}(%/view.0)
        fwd %/sum.1: f32[] = aten.sum(%/neg.0)
        fwd %/max.0: f32[] = aten.maximum(%/sum.0, %/sum.1)
        return [%/max.0]
    """
    split = SPLIT.replace("aten.split_with_sizes(%/exp.0", "aten.split_with_sizes(%/mul.0")
    split = split.replace("fwd %/split", "fwd %/mul.0: f32[6] = aten.{mul}(%/exp.0, 2)\nfwd %/split")
    relu = "fwd %/relu.0: f32[2] = aten.{relu}(%/part.0)"
    check(
        f"{split}{relu}{rest}".format(mul="mul.Scalar", relu="relu", neg="neg", one="%/relu.0"),
        Reinplace(),
        f"{split}{relu}{rest}".format(mul="mul_.Tensor", relu="relu_", neg="neg_", one="%/relu.0"),
    )


def test_a_part_stays_that_is_needed_itself_or_in_another_split_or_with_the_whole() -> None:
    for later in (
        "fwd %/last.0: f32[2] = aten.exp(%/part.0)",
        "fwd %/last.0: f32[6] = aten.exp(%/exp.0)",
        """
        fwd %/split.1: (f32[3], f32[3]) = aten.split_with_sizes(%/exp.0, [3, 3], 0)
        fwd %/part.2: f32[3] = getitem(%/split.1, 0)
        fwd %/last.0: f32[3] = aten.exp(%/part.2)
        """,
    ):
        check(
            f"""
            {SPLIT}
            fwd %/relu.0: f32[2] = aten.relu(%/part.0)
            {later}
            fwd %/sum.0: f32[] = aten.sum(%/relu.0)
            fwd %/sum.1: f32[] = aten.sum(%/last.0)
            fwd %/sum.2: f32[] = aten.sum(%/view.0)
            fwd %/max.0: f32[] = aten.maximum(%/sum.0, %/sum.1)
            fwd %/max.1: f32[] = aten.maximum(%/max.0, %/sum.2)
            return [%/max.1]
            """,
            Reinplace(),
            None,
        )


def test_parts_of_expanded_memory_lie_in_one_place() -> None:
    check(
        """
        in  %x: f32[1] = input
        fwd %/exp.0: f32[1] = aten.exp(%x)
        fwd %/expand.0: f32[2](0) = aten.expand(%/exp.0, [2])
        fwd %/split.0: (f32[1](0), f32[1](0)) = aten.split_with_sizes(%/expand.0, [1, 1], 0)
        fwd %/part.0: f32[1](0) = getitem(%/split.0, 0)
        fwd %/part.1: f32[1](0) = getitem(%/split.0, 1)
        fwd %/view.0: f32[1] = aten.view(%/part.0, [1])
        fwd %/neg.0: f32[1] = aten.neg(%/view.0)
        fwd %/add.0: f32[1] = aten.add.Tensor(%/part.1, %/part.1)
        fwd %/max.0: f32[1] = aten.maximum(%/neg.0, %/add.0)
        fwd %/sum.0: f32[] = aten.sum(%/max.0)
        return [%/sum.0]
        """,
        Reinplace(),
        None,
    )
